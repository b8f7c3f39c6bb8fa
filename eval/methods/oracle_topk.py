"""Oracle top-k: the keys with the largest exact scores. Its search is free, so it bounds the selection family."""

from certjax.eval.methods.protocol import (
    Method,
    Outcome,
    Problem,
    attend_to,
    beyond_window,
    newest,
    nothing,
    scores,
)
from certjax.eval.methods.selection import top


def attend(problem: Problem, index, query, budget, rng) -> Outcome:
    """Window, and for each query head the keys with the largest q · k. Bytes: rows read; none for the search."""
    score = scores(problem, query)
    window = newest(problem)
    best = top(score, beyond_window(problem, budget), ~window)
    return attend_to(problem, query, best | window, score=score)


METHOD = Method("oracle_topk", "Oracle top-k", "", "oracle", nothing, attend)
