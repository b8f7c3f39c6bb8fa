"""All methods by name, in the order of the tables.

HashAttention (2412.14468) is left out: its hashes are learned for each model, and with untrained ones it is another
method.
"""

from certjax.eval.methods import (
    certified,
    clusterkv,
    dense,
    double_sparsity,
    expected_attention,
    h2o,
    infllm,
    keydiff,
    knorm,
    loki,
    magicpig,
    oracle_topk,
    oracle_topp,
    paper_bounds,
    pqcache,
    pyramidkv,
    quest,
    scissorhands,
    shadowkv,
    snapkv,
    socket,
    sparq,
    squeezed,
    streaming_llm,
    tactic,
    tova,
    twilight,
    uniform,
    vattention,
)
from certjax.eval.methods.protocol import Method

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        dense.METHOD,
        certified.METHOD,
        paper_bounds.METHOD,
        oracle_topk.METHOD,
        oracle_topp.METHOD,
        streaming_llm.METHOD,
        h2o.METHOD,
        tova.METHOD,
        scissorhands.METHOD,
        snapkv.METHOD,
        pyramidkv.METHOD,
        knorm.METHOD,
        keydiff.METHOD,
        expected_attention.METHOD,
        quest.METHOD,
        infllm.METHOD,
        double_sparsity.METHOD,
        sparq.METHOD,
        loki.METHOD,
        pqcache.METHOD,
        squeezed.METHOD,
        clusterkv.METHOD,
        tactic.METHOD,
        twilight.METHOD,
        shadowkv.METHOD,
        socket.METHOD,
        magicpig.METHOD,
        uniform.METHOD,
        vattention.AS_IS,
        vattention.FIXED,
    )
}
