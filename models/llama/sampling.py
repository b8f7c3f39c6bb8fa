"""The next token: greedy, or drawn at a temperature from the most likely tokens."""

import jax
import jax.numpy as jnp


def sample(
    logits: jax.Array,
    rng: jax.Array,
    *,
    temperature: jax.Array | None,
    top_k: jax.Array | None = None,
    top_p: jax.Array | None = None,
) -> jax.Array:
    """Chooses one token a row.

    Args:
      logits: float32 [B, V].
      rng: key; not used where greedy.
      temperature: positive float32 scalar, divides the logits; None for the most likely token.
      top_k: int32 scalar ≥ 1: draws from the k most likely tokens, and from those as likely as the last of them; None
        for all. Sorts the vocabulary, as top_p does.
      top_p: float32 scalar in (0, 1]: draws from the smallest set of most likely tokens that has at least this
        probability (after top_k); None for all.

    Returns:
      int32 [B].
    """
    if temperature is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / temperature
    if top_k is not None or top_p is not None:
        ordered = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
    if top_k is not None:
        last = jnp.take(ordered, jnp.minimum(top_k, logits.shape[-1]) - 1, axis=-1)[..., None]
        logits = jnp.where(logits >= last, logits, -jnp.inf)
        ordered = jnp.where(ordered >= last, ordered, -jnp.inf)
    if top_p is not None:
        probability = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(probability, axis=-1) - probability  # mass of the tokens ahead of each: 0 for the first
        lowest = jnp.where(before < top_p, ordered, jnp.inf).min(-1, keepdims=True)
        logits = jnp.where(logits >= lowest, logits, -jnp.inf)
    return jax.random.categorical(rng, logits, axis=-1).astype(jnp.int32)
