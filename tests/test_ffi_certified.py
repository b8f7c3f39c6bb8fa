"""The certified step of the extension against its definition, and the same bits on every level and thread count."""

import dataclasses
import os
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from certjax import _ffi
from tests.shared.certified_cases import Case, assert_same_results, assert_same_step, draw, hints, no_hint, run_both
from tests.shared.ffi_cases import DTYPES, LEVELS

EPSILONS = {"value": (0.05, 0.15, 0.2, 0.3), "output": (0.1, 0.3, 0.4, 0.5)}
LONG = (8320, 7001)
OUTPUT = ("measure", "output")

CASES = (
    Case(),
    Case("bfloat16", 64, 3, (OUTPUT, ("window", 0))),
    Case("float16", 80, 5, (("attention_span", 8001), ("sinks", 1003), ("window", 17)), LONG, kv_heads=1),
    Case("float32", 32, 2, (("always_sample", False),), LONG),
)
SLOW_CASES = (
    Case("float32", 32, 1, (("sinks", 5), ("window", 33), ("attention_span", 1500))),
    Case("bfloat16", 128, 4),
    Case("float16", 96, 8, (OUTPUT, ("window", 129))),
    Case("float32", 192, 16, (("sinks", 64), ("window", 0))),
    Case("bfloat16", 256, 2, (("attention_span", 1000),)),
    Case("float16", 16, 1, (("window", 1),), (2048, 65, 64, 63)),
    Case("float32", 128, 8, (OUTPUT, ("sinks", 3))),
    Case("bfloat16", 64, 5, (("attention_span", 9000), ("window", 7)), (12288, 8191), kv_heads=1),
)


def _compare(case, seeds, value_sizes=(1.0,)):
    heads = sampled = ties = 0
    epsilons = EPSILONS[case.config().measure]
    for seed in range(seeds):
        for size in value_sizes:
            query, cache, words, _ = draw(case, seed, size)
            both = run_both(case, query, cache, words, epsilons[(seed + 1) % 4], hints(case, seed))
            counts = assert_same_step(case, cache, *both)
            heads += query.shape[0] * query.shape[1] * query.shape[2]
            sampled, ties = sampled + counts[0], ties + counts[1]
    print(f"{case}: {heads} heads, {sampled} sampled, {ties} ties")
    assert sampled > heads / 20
    assert ties <= 1 + heads / 200


class DefinitionTest(chex.TestCase):
    # Pitfall 36.
    @parameterized.parameters(*CASES)
    def test_matches_the_definition(self, *case):
        _compare(Case(*case), 6)

    def test_values_of_every_magnitude(self):
        _compare(CASES[0], 3, (1e-41, 1e-30, 1e-13, 1e13, 1e20, 1e28))

    @parameterized.parameters(*SLOW_CASES)
    @pytest.mark.slow
    def test_matches_the_definition_elsewhere(self, *case):
        _compare(Case(*case), 11)


SHAPES = (("bfloat16", 16, 1), ("float16", 48, 16), ("float32", 80, 3), ("bfloat16", 192, 5), ("float32", 256, 8))


class SameBitsTest(chex.TestCase):
    @parameterized.parameters(*SHAPES)
    def test_every_level(self, *shape):
        self.compare_levels(*shape)

    @parameterized.product(dtype=DTYPES, head_dim=(64, 96, 128, 256), group=(1, 2, 3, 4, 5, 8, 16))
    @pytest.mark.slow
    def test_every_level_elsewhere(self, dtype, head_dim, group):
        self.compare_levels(dtype, head_dim, group)

    def compare_levels(self, dtype, head_dim, group):
        case = Case(dtype, head_dim, group, (("sinks", 3), ("window", 21)), (2048, 701))
        query, cache, words, _ = draw(case, 4)
        for hint in (no_hint(case), hints(case, 1)):
            args = (query, cache, words, case.config(0.3), hint)
            scalar = _ffi.certified_decode(*args, isa="scalar")
            for level in LEVELS:
                for _ in range(2):
                    assert_same_results(_ffi.certified_decode(*args, isa=level), scalar)
        assert not np.asarray(
            _ffi.certified_decode(query, cache, words, case.config(0.3), no_hint(case))[1].exact
        ).all()

    def test_rows_alone_and_in_a_batch(self):
        case = Case("bfloat16", 32, 3, lengths=(2048, 1001, 9, 0))
        query, cache, words, _ = draw(case, 4)
        args = (query, cache, words, hints(case, 2))
        run = lambda query, cache, words, hint: _ffi.certified_decode(query, cache, words, case.config(0.3), hint)
        together = run(*args)
        for b in range(4):
            row = jax.tree.map(lambda x, b=b: x[b : b + 1], args)
            assert_same_results(run(*row), jax.tree.map(lambda x, b=b: x[b : b + 1], together))
        rows = jax.tree.map(lambda x: x[:, None], args)
        mapped = jax.vmap(run)(*rows)
        assert_same_results(mapped, jax.tree.map(lambda x: x[:, None], together))

    def test_keys_beyond_the_length_are_not_used(self):
        case = Case(lengths=(2048, 701))
        query, cache, words, _ = draw(case, 4)
        args = (words, case.config(0.3), no_hint(case))
        beyond = (jnp.arange(cache.capacity)[None] >= cache.length[:, None])[:, None, :, None]
        spoiled = {name: jnp.where(beyond, jnp.nan, getattr(cache, name)) for name in ("key", "value")}
        spoiled |= {
            name: jnp.where(beyond[..., 0], jnp.uint16(0x7FC0), getattr(cache, name))
            for name in ("residual_norm", "value_size", "value_norm")
        }
        cache_with_nan = dataclasses.replace(cache, **spoiled)
        assert_same_results(
            _ffi.certified_decode(query, cache, *args), _ffi.certified_decode(query, cache_with_nan, *args)
        )


THREADS = """
import os, sys
cpus = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, cpus[: int(sys.argv[1])])
import hashlib
import jax, numpy as np
from certjax import _ffi
from tests.shared.certified_cases import Case, draw, no_hint
case = Case("float32", 64, 3, lengths=(4544, 3001))
query, cache, words, _ = draw(case, 4)
step = jax.jit(lambda *args: _ffi.certified_decode(*args, case.config(0.2), no_hint(case)))
digest = hashlib.sha256()
for repeat in range(10):
    result = step(query, cache, words + np.uint32(repeat))
    for x in jax.tree.leaves(result):
        digest.update(np.asarray(x).tobytes())
print(digest.hexdigest(), bool(np.asarray(result[1].exact).all()), _ffi.thread_count())
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system cannot pin a process to a CPU")
def test_any_number_of_threads():
    environment = {name: x for name, x in os.environ.items() if name != "XLA_FLAGS"}  # devices add threads
    outputs = []
    for cpus in (1, 64):
        command = [sys.executable, "-c", THREADS, str(cpus)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True, env=environment)
        outputs.append(done.stdout.split())
    (digest, exact, one), (other_digest, _, many) = outputs
    assert digest == other_digest
    assert exact == "False"
    if len(os.sched_getaffinity(0)) > 1:
        assert int(one) < int(many)
