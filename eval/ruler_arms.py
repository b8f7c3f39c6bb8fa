"""The kinds of attention that `certjax ruler` runs, by name."""

import dataclasses
import time
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

import certjax
from certjax import retrieval
from certjax.eval import retrieval_attention, stepwise
from certjax.eval.inputs import Recorded
from certjax.eval.tasks import ruler
from certjax.eval.tasks.ruler.runner import Setup
from certjax.models import Tokenizer
from certjax.models.llama import Llama
from certjax.models.llama.modeling import DecodeAttention

STRATEGIES = {
    "softmax_lift": retrieval.SoftmaxLift,
    "top_k": retrieval.TopK,
    "top_k_sampling": retrieval.TopKSampling,
}
SINKS = 1  # oldest tokens that are exact
NAMES = ("dense", "certified", "certified_always_sample", *STRATEGIES)


def always_sample(query, cache, *, rng, hint, config):
    """Certified attention that samples wherever a level certifies, whatever its cost model says of short contexts."""
    config = dataclasses.replace(config, always_sample=True)
    return certjax.decode_attention(query, cache, rng=rng, config=config, hint=hint)


Arm: TypeAlias = str | DecodeAttention | retrieval.Strategy


def arm(name: str, k: int, window: int) -> Arm:
    """What goes by a name of `NAMES`; strategies have this budget and window.

    Raises:
      ValueError: another name, or a budget or window that a strategy cannot have.
    """
    if name not in NAMES:
        raise ValueError(f"attention must be one of {', '.join(NAMES)}: got {name!r}")
    if name in STRATEGIES:
        return STRATEGIES[name](budget=k, window=window, sinks=SINKS)
    return always_sample if name == "certified_always_sample" else name


def describe(arm: Arm) -> str:
    """The same text for the same attention, in any process."""
    if isinstance(arm, str | retrieval.Strategy):
        return str(arm)
    named = arm if hasattr(arm, "__qualname__") else type(arm)
    return f"{named.__module__}.{named.__qualname__}"


def answer_by_retrieval(
    model: Llama,
    tokenizer: Tokenizer,
    sample: ruler.Sample,
    *,
    strategy: retrieval.Strategy,
    setup: Setup,
    rng: jax.Array,
    start: ruler.Start,
) -> ruler.Answer:
    """As `ruler.run_sample`, over an exact index (`Flat`) of what was read with exact attention.

    Every sample has a length of its own, so that programs compile anew: the layers are called one by one, for which one
    layer is compiled. Rounding differs from that of a whole compiled model, and may turn a choice between two tokens.

    Args:
      model: the model.
      tokenizer: its tokenizer.
      sample: of `ruler.generate`.
      strategy: which keys are asked for.
      setup: "A" or "B".
      rng: key of the strategy's draws.
      start: of `ruler.read` for this sample, which is not used up.

    Raises:
      ValueError: the model has layers with a sliding window.
    """
    held, fed, chosen = start.context, start.rest, []
    if setup == "A":
        held, fed = [*held, *fed], [int(jnp.argmax(start.logits[0]))]
        chosen = fed
    if chosen and (chosen[0] in tokenizer.eos_ids or sample.budget == 1):
        return _answer(tokenizer, chosen, {}, steps=0)
    caches = tuple(dataclasses.replace(cache, length=jnp.full_like(cache.length, len(held))) for cache in start.caches)
    config = model.config
    none = np.zeros((len(caches), 0, config.num_heads, config.head_dim), np.float32)
    hints, _ = retrieval_attention.build(
        strategy, retrieval.Flat(), Recorded(caches, none, held), seed=int(jax.random.bits(rng))
    )
    attention = retrieval_attention.RetrievalAttention(strategy)
    stepper = stepwise.Stepper(model, attention, config=certjax.Config())
    limit = sample.budget - len(chosen)
    more, _ = stepper.answer(fed, caches, hints, limit=limit, ends=set(tokenizer.eos_ids), clock=time.monotonic)
    stepwise.forget()
    pool = hints[0].stop - hints[0].start
    facts = {}
    if (budget := getattr(strategy, "budget", None)) is not None:
        facts = {"keys_read": float(min(budget, pool)), "exact": float(pool <= budget)}
    return _answer(tokenizer, [*chosen, *more], facts, steps=len(fed) + len(more) - 1)


def _answer(tokenizer: Tokenizer, tokens: list[int], facts: dict[str, float], *, steps: int) -> ruler.Answer:
    return ruler.Answer(tokenizer.decode(tokens), tokens, tokens[-1] in tokenizer.eos_ids, steps, facts)
