"""The certificate of the certified sparse attention paper (paper.py) behind the protocol. Not traceable: numpy."""

import jax
import jax.numpy as jnp
import numpy as np

from certjax.eval.methods.paper import paper_attend
from certjax.eval.methods.protocol import Knob, Method, Outcome, Problem, newest, nothing, row_bytes

DELTA = 1e-3


def attend(problem: Problem, index, query, budget, rng) -> Outcome:
    """One step with ε = budget, value measure; all heads of the group share the perturbations.

    Bytes: rows read, counted for each head as if no head shared them, and none for the scan that finds candidates,
    which is not modelled. No normaliser is told: NaN.
    """
    keys, values = (np.asarray(x.astype(jnp.float32), np.float64) for x in (problem.keys, problem.values))
    window = np.asarray(newest(problem))[0]
    uniforms = 1.0 - np.asarray(jax.random.uniform(rng, (problem.shape[0],)), np.float64)
    heads = [
        paper_attend(keys @ q * problem.scale, values, window, uniforms, epsilon=float(budget), delta=DELTA)
        for q in np.asarray(query, np.float64)
    ]
    read = np.array([head["keys_read"] + window.sum() for head in heads])
    return Outcome(
        output=jnp.asarray(np.stack([head["output"] for head in heads]), jnp.float32),
        keys_read=jnp.asarray(read, jnp.int32),
        bytes_read=jnp.asarray(2.0 * row_bytes(problem) * read, jnp.float32),
        log_normalizer=jnp.full(len(heads), jnp.nan, jnp.float32),
    )


METHOD = Method(
    "paper",
    "Certified, the paper's bounds",
    "",
    "certified",
    nothing,
    attend,
    budget="none",
    knob=Knob("epsilon", 0.5, 0.01),
    traceable=False,
)
