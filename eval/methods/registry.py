"""All methods by name, in the order of the tables.

HashAttention (2412.14468) is left out: its hashes are learned for each model, and with untrained ones it is another
method.
"""

from certjax.eval.methods import (
    dense,
    h2o,
    oracle_topk,
    oracle_topp,
    pyramidkv,
    quest,
    scissorhands,
    snapkv,
    streaming_llm,
    tova,
    uniform,
)
from certjax.eval.methods.protocol import Method

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        dense.METHOD,
        oracle_topk.METHOD,
        oracle_topp.METHOD,
        streaming_llm.METHOD,
        h2o.METHOD,
        tova.METHOD,
        scissorhands.METHOD,
        snapkv.METHOD,
        pyramidkv.METHOD,
        quest.METHOD,
        uniform.METHOD,
    )
}
