"""StreamingLLM: the first four keys and the newest ones.

The original positions are kept; the paper assigns new ones inside its cache.
"""

from certjax.eval.methods.protocol import Method, Outcome, Problem, attend_to, nothing, oldest

SINKS = 4


def attend(problem: Problem, index, query, budget, rng) -> Outcome:
    """The first 4 keys and the last budget − 4. Bytes: rows read, the same for the whole group."""
    newest = oldest(problem, problem.shape[0] + SINKS - budget)
    return attend_to(problem, query, oldest(problem, SINKS) | ~newest)


METHOD = Method("streaming_llm", "StreamingLLM (positions kept)", "2309.17453", "eviction", nothing, attend)
