"""δ over a generation: a union bound over every query head of every layer, row and step."""


def delta_per_call(delta_total: float, *, heads: int, layers: int, steps: int, batch: int = 1) -> float:
    """The `Config.delta` with which all outputs of a generation hold together with probability ≥ 1 − delta_total.

    delta_total / (heads · layers · batch · steps). It needs fresh random keys at every step and layer. It promises
    that each head's output is within ε of dense attention *on the same inputs*, not that the text is the same.

    Args:
      delta_total: probability in (0, 1) that any certified output of the generation is off.
      heads: query heads N of a layer.
      layers: layers that use certified attention.
      steps: decode steps at most.
      batch: rows B.

    Raises:
      ValueError: a count below 1 or a probability outside (0, 1).
    """
    if not 0 < delta_total < 1:
        raise ValueError(f"delta_total must lie in (0, 1): got {delta_total}")
    for name, x in (("heads", heads), ("layers", layers), ("steps", steps), ("batch", batch)):
        if x < 1:
            raise ValueError(f"{name} must be at least 1: got {x}")
    return delta_total / (heads * layers * batch * steps)


def delta_spent(delta: float, *, calls: int) -> float:
    """Upper bound of the probability that any of `calls` head outputs exceeded its bound: min(1, delta · calls).

    Count every head output that was asked for, those that came out exact too: which ones do depends on the same random
    perturbations, and a bound over those that did not would be chosen after the draw.
    """
    return min(1.0, delta * calls)
