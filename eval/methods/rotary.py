"""Rotary positions of cached keys and past queries, taken off and put on again."""

import jax.numpy as jnp


def turn(x, cos, sin):
    """Turns channel j together with channel j + H / 2: x [..., H], cos and sin [..., H / 2] of the same rank."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def turn_back(x, cos, sin):
    """The inverse of `turn`, also where the table carries an attention factor."""
    size = cos * cos + sin * sin
    return turn(x, cos / size, -sin / size)
