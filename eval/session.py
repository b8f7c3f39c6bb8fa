"""A model with a cache that stays between prompts: what a prompt shares with the last one is not read again."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import certjax
from certjax.eval.progress import Progress
from certjax.models.llama import Llama, decode, prefill

_ROUND = 1024  # tokens: capacities are multiples of it, so that prompts of other lengths run the programs of the last
_SILENT = 2.0  # seconds before a progress line appears


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a model said to a prompt.

    Attributes:
      tokens: ids, the end token included.
      finish_reason: "stop" after an end token, "length" without one.
      statistics: arrays [steps, L, N] as in `GenerateResult`, of the steps taken: one fewer than tokens.
      read: tokens of the prompt that were read; the others were in the cache.
      prefill_s: seconds that reading took, its compilation included.
      decode_s: seconds from then to the last token, likewise.
      tokens_per_s: after the second token, by when everything is compiled; None for fewer than three tokens.
    """

    tokens: list[int]
    finish_reason: Literal["stop", "length"]
    statistics: dict[str, np.ndarray]
    read: int
    prefill_s: float
    decode_s: float
    tokens_per_s: float | None


class Session:
    """Prompts one after another, each the one before, its answer, and more; any other prompt is read from the start.

    Args:
      model: the model.
      context: tokens that prompt and answer may have together.
      end_ids: tokens that end an answer.

    Raises:
      ValueError: more tokens than the model can have.

    Memory: a bfloat16 cache of `context` tokens, rounded up to 1024.
    """

    def __init__(self, model: Llama, context: int, end_ids: Iterable[int] = ()):
        if context > model.config.max_positions:
            raise ValueError(f"context of {context} tokens exceeds the model's {model.config.max_positions}")
        self._model, self._context, self._end_ids = model, context, frozenset(end_ids)
        self._caches: Any = None
        self._held: list[int] = []

    def answer(
        self,
        ids: Sequence[int],
        *,
        max_new_tokens: int,
        rng: jax.Array,
        on_token: Callable[[int], None] | None = None,
        **options: Any,
    ) -> Answer:
        """Generates after a prompt.

        Args:
          ids: the whole prompt.
          max_new_tokens: at most.
          rng: key.
          on_token: called with every token.
          options: for `decode`: temperature, top_k, top_p, certified_config, delta_scope.

        Raises:
          ValueError: prompt and new tokens exceed the context; or as for `decode`.
        """
        if len(ids) + max_new_tokens > self._context:
            raise ValueError(
                f"prompt of {len(ids)} tokens and {max_new_tokens} new ones exceed the context of {self._context}; "
                "shorten the prompt or generate less"
            )
        start = time.monotonic()
        caches, rest = self._reuse(list(ids))
        with Progress("reading the prompt", "tokens", after=_SILENT) as progress:
            logits, caches = prefill(self._model, [rest], caches, progress=progress)
            logits.block_until_ready()
        times = [time.monotonic()]
        with contextlib.ExitStack() as preparing:
            preparing.enter_context(Progress("preparing to generate", after=_SILENT))

            def stream(_: int, tokens: np.ndarray) -> None:
                times.append(time.monotonic())
                preparing.close()
                if on_token is not None:
                    on_token(int(tokens[0]))

            result, caches = decode(
                self._model, logits, caches, max_new_tokens=max_new_tokens, rng=rng, end_ids=self._end_ids,
                stream=stream, **options,
            )  # fmt: skip
        count = int(result.lengths[0])
        tokens = [int(token) for token in result.tokens[0, :count]]
        self._caches, self._held = caches, [*ids, *tokens[:-1]]
        return Answer(
            tokens=tokens,
            finish_reason="stop" if tokens[-1] in self._end_ids else "length",
            statistics={name: np.asarray(x)[: count - 1, :, 0] for name, x in result.statistics.items()},
            read=len(rest),
            prefill_s=times[0] - start,
            decode_s=times[-1] - times[0],
            tokens_per_s=(count - 2) / (times[-1] - times[2]) if count > 2 else None,
        )

    def _reuse(self, ids: list[int]) -> tuple[Any, list[int]]:
        """Caches, and the tokens that they do not hold: one at least."""
        caches, held = self._caches, self._held
        self._caches, self._held = None, []  # they are donated: gone, should anything fail on the way
        same = 0
        while same < min(len(held), len(ids) - 1) and held[same] == ids[same]:
            same += 1
        if not same:
            return self._model.init_caches(1, -(-self._context // _ROUND) * _ROUND, jnp.bfloat16), ids
        # What lies behind the length is written over, block by block. An array each: they are donated.
        cut = tuple(dataclasses.replace(cache, length=jnp.full((1,), same, jnp.int32)) for cache in caches)
        return cut, ids[same:]


def certificate_summary(
    answer: Answer, config: "certjax.Config", delta_scope: str, max_new_tokens: int
) -> dict[str, Any]:
    """JSON: what was promised of the attention calls of an answer, one a head, layer and step, and what came of it.

    `delta_spent` bounds the probability that any of them was off.
    """
    certified, exact = answer.statistics["certified"], answer.statistics["exact"]
    _, layers, heads = certified.shape
    delta = config.delta
    if delta_scope == "generation":
        delta = certjax.delta_per_call(delta, heads=heads, layers=layers, steps=max(max_new_tokens - 1, 1))
    sampled = certified & ~exact
    return {
        "measure": config.measure,
        "epsilon": config.epsilon,
        "delta": config.delta,
        "delta_scope": delta_scope,
        "delta_per_call": delta,
        "delta_spent": certjax.delta_spent(delta, calls=certified.size),
        "calls": certified.size,
        "certified": int(certified.sum()),
        "sampled": int(sampled.sum()),
        "exact": int(exact.sum()),
        "keys_read_per_sampled_call": float(answer.statistics["keys_read"][sampled].mean()) if sampled.any() else None,
    }
