"""When sampling pays, in integers, so that every implementation decides the same.

Unit: a twentieth of what dense attention spends on one key of one kv head. The scan of a pool key costs 9 units, a key
sampled for one query head 100 (its own value row, and the rows of keys that were looked at in vain), a step 10 000.
Measured at d 64 with 3 query heads, keys in cache and not (BUILD_NOTES.md); larger head dimensions shift all terms
alike. The decision affects speed only, never validity: it is taken from earlier steps.
"""

import jax
import jax.numpy as jnp

WAIT = 32  # steps of dense attention before sampling is tried again: a vain try costs less than 5 % of them


def pays(attended: jax.Array, pool: jax.Array, keys: jax.Array) -> jax.Array:
    """Whether a step that samples `keys` keys in all for a group of query heads costs less than dense attention.

    Args:
      attended: keys that dense attention reads, any integer dtype.
      pool: of these, keys that are scanned.
      keys: sum of the sampled keys over the query heads of the kv head.
    """
    attended, pool, keys = (x.astype(jnp.float32) for x in (attended, pool, keys))
    return 9 * pool + 100 * keys + 10_000 < 20 * attended  # exact in float32 up to far beyond where it matters


def go_on(running: jax.Array, certified: jax.Array, expected: jax.Array, attended: jax.Array) -> jax.Array:
    """Which heads go to their next level, bool [..., G]: all that are running, or none of the group.

    None where a head of the group gave up, since all rows are read for it anyway, or where the group's expected samples
    exceed a quarter of the keys: 25 units an attended key, when dense attention costs 20. What is spent in vain then
    stays below the cost of one and a half dense steps.

    Args:
      running: bool [..., G], not certified, and there is a next level.
      certified: bool [..., G].
      expected: float32 [..., G], keys of the sample: of the next level, or of the one that certified.
      attended: integer [..., 1], keys that dense attention reads.
    """
    gave_up = (~running & ~certified).any(-1, keepdims=True)
    dear = 4 * expected.sum(-1, keepdims=True) > attended.astype(jnp.float32)
    return running & ~gave_up & ~dear
