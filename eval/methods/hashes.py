"""Sign hashes of keys and queries: tables of random planes, the signs of a table packed into a bucket number."""

import jax
import jax.numpy as jnp


def draw_planes(rng: jax.Array, tables: int, bits: int, width: int) -> jax.Array:
    """Independent normal directions, float32 [tables, bits, H]."""
    return jax.random.normal(rng, (tables, bits, width))


def buckets(planes: jax.Array, rows: jax.Array) -> jax.Array:
    """Bucket of every row [A, H] in every table, uint16 [tables, A]; one table at a time, to save memory."""
    power = 2 ** jnp.arange(planes.shape[1], dtype=jnp.int32)

    def bucket(table):
        bits = (rows @ table.T >= 0).astype(jnp.int32)
        return (bits * power[None]).sum(-1).astype(jnp.uint16)

    return jax.lax.map(bucket, planes)
