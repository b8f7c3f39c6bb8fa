"""TOVA: the keys to which the last query paid most attention, averaged over heads.

The heads are those of the group, not of the layer. The paper evicts one key a step; here the last past query chooses
at once.
"""

from certjax.eval.methods.history import past_sum
from certjax.eval.methods.protocol import Method, Outcome, Problem, attend_to, beyond_window, newest
from certjax.eval.methods.selection import top


def prepare(problem: Problem, rng):
    """Attention of the last past query, mean over the group: float32 [1, n]."""
    return past_sum(problem, 1, lambda weight, seen: weight).mean(0, keepdims=True)


def attend(problem: Problem, index, query, budget, rng) -> Outcome:
    """The keys with the largest attention, one set for the group. Only the window spares recent keys.

    Bytes: rows read.
    """
    window = newest(problem)
    return attend_to(problem, query, top(index, beyond_window(problem, budget), ~window) | window)


METHOD = Method("tova", "TOVA", "2401.06104", "eviction", prepare, attend, history=True)
