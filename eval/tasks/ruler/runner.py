"""One sample through a model: the prompt read with exact attention, then any attention, greedily, until it ends."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

import certjax
from certjax.eval.tasks.ruler.tasks import Sample, encode
from certjax.models import Tokenizer
from certjax.models.llama import Llama, prefill
from certjax.models.llama.modeling import CERTIFICATE_METRICS, Caches, DecodeAttention
from certjax.types import BLOCK

Setup = Literal["A", "B"]
_PAD = 128  # question and answer take buffers of a multiple of it, so that few shapes are compiled


@dataclasses.dataclass(frozen=True)
class Start:
    """A prompt in the caches.

    Attributes:
      context: ids of the context.
      rest: ids of question and answer prefix.
      logits: float32 [1, V] after the last of them.
      caches: one a layer, holding all of them; row 1 of 1.
    """

    context: list[int]
    rest: list[int]
    logits: jax.Array
    caches: Caches


@dataclasses.dataclass(frozen=True)
class Answer:
    """What came out.

    Attributes:
      text: decoded, without special tokens.
      tokens: ids, an end token included.
      ended: whether an end token came before the budget was spent.
      steps: calls of each layer's attention: tokens fed after the prefill.
      statistics: means over steps, layers and query heads of what the certificates say (`certified`, `exact`,
        `keys_read`, `candidates`, `bytes_read`); empty if there was no step.
    """

    text: str
    tokens: list[int]
    ended: bool
    steps: int
    statistics: dict[str, float]


def read(model: Llama, tokenizer: Tokenizer, sample: Sample, *, cache_dtype: str = "bfloat16") -> Start:
    """Reads the whole prompt with exact attention; serves both setups and any attention.

    Args:
      model: the model.
      tokenizer: its tokenizer.
      sample: of `generate`.
      cache_dtype: float32, bfloat16 or float16.

    Raises:
      ValueError: prompt and budget exceed the sample's length or the model's longest context.

    Memory: caches for `sample.length` tokens.
    """
    context, rest = encode(tokenizer, sample.context, sample.question, sample.answer_prefix)
    need = len(context) + len(rest) + sample.budget
    for limit, whose in ((sample.length, "its length"), (model.config.max_positions, "the model's longest context")):
        if need > limit:
            raise ValueError(
                f"{sample.id}: {len(context) + len(rest)} tokens, chat format included, and {sample.budget} for the "
                f"answer exceed {whose} of {limit}; ask for a smaller length, or generate with this tokenizer"
            )
    caches = model.init_caches(1, -(-sample.length // BLOCK) * BLOCK, cache_dtype)
    logits, caches = prefill(model, [[*context, *rest]], caches)
    return Start(context, rest, logits, caches)


def run_sample(
    model: Llama,
    tokenizer: Tokenizer,
    sample: Sample,
    *,
    attention: str | DecodeAttention,
    setup: Setup,
    rng: jax.Array,
    config: "certjax.Config",
    end_ids: Iterable[int] | None = None,
    start: Start | None = None,
    cache_dtype: str = "bfloat16",
) -> Answer:
    """Answers a sample.

    Setup A reads the whole prompt with exact attention and uses `attention` for generated tokens: the first of them is
    exact. Setup B reads the context so, and feeds question, answer prefix and generated tokens one by one through
    `attention`; the caches are those of A cut back to the context.

    Args:
      model: the model.
      tokenizer: its tokenizer.
      sample: of `generate`.
      attention: as for `Llama`.
      setup: "A" or "B".
      rng: key of the perturbations.
      config: for the attention; its δ is that of a single call.
      end_ids: tokens that end an answer; None for all of the tokenizer's.
      start: of `read` for this sample, which is not used up; None reads it.
      cache_dtype: as for `read`.

    Raises:
      ValueError: an unknown setup or attention, and as for `read`.

    Cost: one compilation for each attention and length, whatever the task.
    Memory: a copy of the caches.
    """
    if setup not in ("A", "B"):
        raise ValueError(f'setup must be "A" or "B", got {setup!r}')
    ends = np.asarray(sorted(tokenizer.eos_ids if end_ids is None else end_ids), np.int32)
    start = read(model, tokenizer, sample, cache_dtype=cache_dtype) if start is None else start
    fed, length = (start.rest, len(start.context)) if setup == "B" else ([], len(start.context) + len(start.rest))
    padded = np.zeros(max(-(-len(fed) // _PAD), 1) * _PAD, np.int32)
    padded[: len(fed)] = fed
    weights, structure = jax.tree.flatten(model.with_attention(attention))
    tokens, count, steps, sums, _ = _answer(
        structure, weights, jax.tree.map(jnp.copy, start.caches), np.int32(length), start.logits, padded,
        np.int32(len(fed)), np.int32(sample.budget), ends, rng, config, room=-(-sample.budget // _PAD) * _PAD,
    )  # fmt: skip
    chosen = np.asarray(tokens)[: int(count)].tolist()
    steps = int(steps)
    return Answer(
        tokenizer.decode(chosen),
        chosen,
        chosen[-1] in set(ends.tolist()),
        steps,
        {name: float(x) / steps for name, x in sums.items()} if steps else {},
    )


@functools.partial(jax.jit, static_argnames=("structure", "room"), donate_argnames=("caches",))
def _answer(
    structure, weights, caches: Caches, length, logits, fed, fed_count, budget, ends, rng, config, *, room: int
):
    """Feeds the first `fed_count` of `fed`, then what is most likely each time, until an end token or the budget.

    The caches are cut back to `length` before.
    """
    model: Llama = jax.tree.unflatten(structure, weights)
    caches = tuple(dataclasses.replace(cache, length=jnp.full_like(cache.length, length)) for cache in caches)

    def choose(state, logits):
        """After `steps` fed tokens: the next one that is given, or the most likely one, which is kept."""
        given = state["steps"] < fed_count
        likely = jnp.argmax(logits[0]).astype(jnp.int32)
        kept = jax.lax.dynamic_update_slice(state["tokens"], likely[None], (state["count"],))
        return state | {
            "token": jnp.where(given, fed[jnp.minimum(state["steps"], fed.size - 1)], likely),
            "tokens": jnp.where(given, state["tokens"], kept),
            "count": jnp.where(given, state["count"], state["count"] + 1),
            "done": ~given & (likely == ends).any(),
        }

    def body(state):
        logits, caches, hints, metrics = model.decode_step(
            state["token"][None], state["caches"], state["hints"], rng=jax.random.fold_in(rng, state["steps"]),
            config=config,
        )  # fmt: skip
        sums = {name: state["sums"][name] + metrics[name].astype(jnp.float32).mean() for name in CERTIFICATE_METRICS}
        state |= {"caches": caches, "hints": hints, "sums": sums, "steps": state["steps"] + 1}
        return choose(state, logits)

    state = {
        "steps": jnp.int32(0),
        "count": jnp.int32(0),
        "tokens": jnp.zeros((room,), jnp.int32),
        "caches": caches,
        "hints": model.init_hints(1),
        "sums": dict.fromkeys(CERTIFICATE_METRICS, jnp.float32(0)),
    }
    state = jax.lax.while_loop(lambda s: ~s["done"] & (s["count"] < budget), body, choose(state, logits))
    # The caches too, so that they are updated where they are.
    return state["tokens"], state["count"], state["steps"], state["sums"], state["caches"]
