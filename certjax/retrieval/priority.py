"""Priority sampling: K weights out of n whose sums estimate sums over all of them.

Draw u_i uniform in (0, 1] and give every weight the priority π_i = w_i / u_i. The K largest priorities are the sample,
the (K + 1)-st is the threshold τ, and a sampled weight counts max(w_i, τ). Then, for weights fixed before the draw,

    E[ŵ_i] = w_i,   E[ŵ_i ŵ_j] = w_i w_j (i ≠ j),   Σ_i Var(ŵ_i) = Var(Σ_i ŵ_i) ≤ W² / (K − 1),   W = Σ_i w_i

(Duffield, Lund and Thorup, "Priority sampling for estimation of arbitrary subset sums", 2007; the variance bound is
Szegedy's, 2006). Of an attention output o = Σ w_i v_i / W with every ‖v_i − o‖ ≤ R this gives, by Chebyshev's
inequality on the denominator and on Σ ŵ_i (v_i − o), each with probability 1/6,

    ‖ô − o‖ ≤ R √6 / (√(K − 1) − √6)   with probability at least 2/3, for K > 7.

It is informative only for K > 25: a convex combination of the values is within R of o in any case.
That is a statement over the draw of u, for queries, keys and values chosen before it: nothing here bounds the error of
a call that was made. `certjax.decode_attention` does. Everything is in logarithms, so no score overflows.
"""

import jax
import jax.numpy as jnp

from certjax import perturbation


def exponentials(rng: jax.Array, count: int) -> jax.Array:
    """−ln u_i of keys 0 … count − 1, u_i in (0, 1] with 53 bits: float32 [count].

    A longer call begins with the numbers of a shorter one, so keys that are appended leave the others alone.

    Args:
      rng: one typed random key.
      count: n.
    """
    return perturbation.exponentials(perturbation.row_words(rng, 1, 1), count)[0, 0]


def weigh(log_weight: jax.Array, exponential: jax.Array, present: jax.Array, total: int) -> tuple[jax.Array, jax.Array]:
    """Weights of a priority sample, from the K + 1 keys with the largest priorities, in any order.

    Args:
      log_weight: ln w_i, float32 [..., K + 1]; −inf is a weight of zero.
      exponential: −ln u_i, float32 [..., K + 1].
      present: bool [..., K + 1], False where an oracle returned nothing. The sample is then that much smaller.
      total: n, keys sampled from. Where all of them are present the weights are exact, and τ = 0.

    Returns:
      ln ŵ_i [..., K + 1], −inf for the key that is the threshold and where nothing is present; and ln τ [...].
    """
    priority = jnp.where(present, log_weight + exponential, jnp.inf)
    place = jnp.argmin(priority, -1, keepdims=True)
    log_tau = jnp.take_along_axis(priority, place, -1)
    complete = present.sum(-1, keepdims=True) == total
    none = ~present.any(-1, keepdims=True)
    log_tau = jnp.where(complete | none, -jnp.inf, log_tau)
    is_threshold = jax.nn.one_hot(place[..., 0], priority.shape[-1], dtype=bool)
    sampled = present & (complete | ~is_threshold)
    return jnp.where(sampled, jnp.maximum(log_weight, log_tau), -jnp.inf), log_tau[..., 0]
