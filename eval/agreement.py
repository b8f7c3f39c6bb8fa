"""`certjax eval agreement`: how long certified and dense attention generate the same text.

Protocol. Both go on from the same caches and the text's own next token, greedily or sampling with the same key; every
token is chosen from what its own kind of attention predicted, so after the first difference the texts part for good.
δ is 0.01 over the generation.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import certjax
from certjax.eval.inputs import Recorded
from certjax.models.llama import Llama, decode

MODES = {"greedy": 0.0, "sampled": 0.8}  # temperatures
DELTA = 0.01


def compare(
    model: Llama, recorded: Recorded, first: int, *, epsilon: float, temperature: float, new_tokens: int, seed: int
) -> dict[str, Any]:
    """Generates with both kinds of attention.

    Args:
      model: the model.
      recorded: attention inputs, whose caches have room for the new tokens.
      first: the text's next token.
      epsilon: value measure.
      temperature: 0 for greedy.
      new_tokens: after `first`.
      seed: of everything random.

    Returns:
      `same`, the share of new tokens that are the same at their place; `first_difference`, the place of the first one
      that is not, or None; what the certificates said.
    """
    # The first token is drawn from these: it is certain.
    logits = jnp.full((1, model.config.vocab_size), -1e9, jnp.float32).at[0, first].set(0)
    results = {
        name: decode(
            model.with_attention(name),
            logits,
            jax.tree.map(jnp.copy, recorded.caches),
            max_new_tokens=new_tokens + 1,
            rng=jax.random.key(seed),
            temperature=temperature,
            certified_config=certjax.Config(epsilon=epsilon, delta=DELTA),
            delta_scope="generation",
        )[0]
        for name in ("dense", "certified")
    }
    ours, dense = (np.asarray(results[name].tokens)[0, 1:] for name in ("certified", "dense"))
    differ = np.flatnonzero(ours != dense)
    statistics = {name: np.asarray(x) for name, x in results["certified"].statistics.items()}
    return {
        "temperature": temperature,
        "new_tokens": new_tokens,
        "same": float((ours == dense).mean()),
        "first_difference": int(differ[0]) if differ.size else None,
        "exact_share": float(statistics["exact"].mean()),
        "all_certified": bool(statistics["certified"].all()),
        "keys": float(statistics["keys_read"].mean()),
    }
