"""The handlers under random calls: each ends with an error, or with a right answer, and touches no memory but its own.

CERTJAX_FUZZ_CALLS and CERTJAX_FUZZ_SEED make longer and other runs of the slow test; `-s` shows what was called.
"""

import collections
import faulthandler
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.shared import fuzz_checks as checks
from tests.shared.ffi_frames import Runtime, Slots
from tests.shared.fuzz_cases import (
    ATTRIBUTES,
    OPERANDS,
    RESULTS,
    Shape,
    corrupt,
    draw_attributes,
    draw_cache,
    draw_shape,
    draw_step,
    encode,
    run,
)
from tests.shared.fuzz_refusals import draw_refusal

HANDLERS = tuple(OPERANDS)
STEPS = 4  # of one cache


@pytest.fixture(scope="module")
def memory():
    return Slots(36, 2 << 20)


@pytest.fixture(autouse=True)
def _no_hang():
    faulthandler.dump_traceback_later(900, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def fuzz(seed: int, calls: int, memory: Slots, hostile: bool) -> collections.Counter:
    """Makes at least this many calls and checks them. Returns what was called, for the record."""
    count: collections.Counter = collections.Counter()
    rng = np.random.default_rng(seed)
    runtime = Runtime(seed)
    seen = set()
    while count["calls"] < calls:
        shape = draw_shape(rng, large=rng.random() < 0.02)
        cache = draw_cache(rng, runtime, shape)
        for _ in range(STEPS):
            handler = rng.choice(HANDLERS, p=(0.15, 0.2, 0.5, 0.15))
            sane = not hostile and rng.random() < 0.9
            x, attributes = draw_step(rng, shape, cache, sane), draw_attributes(rng, shape.storage)
            if hostile:
                corrupt(rng, x, OPERANDS[handler])
            where = f"seed {seed}, after {count['calls']} calls: {handler} {shape} {attributes}"
            error, y, r = run(rng, runtime, memory, handler, shape, x, attributes)
            assert error == "", where
            try:
                checks.check_written(handler, {name: x[name] for name in OPERANDS[handler]}, y, r)
                if not hostile:
                    x, y, r = (checks.flat(shape, a) for a in (x, y, r))
                    with np.errstate(all="ignore"):
                        check(handler, shape, x, y, r, attributes, sane, count)
            except AssertionError as e:
                e.add_note(where)
                raise
            count["calls"] += 1
            count["rows"] += int(np.prod(shape.lead))
            count[handler] += 1
            seen.add((handler, shape, *(attributes[name].item() for name in ATTRIBUTES[handler])))
    count["shapes and attributes"] = len(seen)
    return count


def check(handler, shape, x, y, r, attributes, sane, count):
    match handler:
        case "certjax_append":
            checks.check_append(shape, x, y)
        case "certjax_dense_decode":
            count["dense heads compared"] += checks.check_dense(shape, x, r, attributes)
        case "certjax_certified_decode":
            count["heads sampled"] += checks.check_certified(shape, x, r, attributes, sane)
        case "certjax_scan":
            checks.check_scan(shape, x, r, attributes)


def test_right_answers(memory):
    count = fuzz(1, 160, memory, hostile=False)
    assert count["heads sampled"] > 40
    assert count["dense heads compared"] > 100


def test_hostile_operands(memory):
    fuzz(2, 160, memory, hostile=True)


def test_keys_that_are_no_numbers_spoil_their_own_row_alone(memory):
    """A cache that nobody checked; coding its block converts NaN to an integer, which only sanitizers see."""
    rng, runtime = np.random.default_rng(9), Runtime(9)
    shape = Shape((3,), 1, 1, 128, 16, 2)
    x = draw_step(rng, shape, draw_cache(rng, runtime, shape), sane=True)
    x["key"][:] = rng.standard_normal(x["key"].shape)
    x["new_key"][:], x["new_value"][:] = 1, 1
    x["length"][:], x["valid"][:], x["active"][:] = 63, True, True
    attributes = {"storage": np.int32(2), "isa": np.int32(-1)}
    error, expected, _ = run(rng, runtime, memory, "certjax_append", shape, x, attributes)
    assert error == ""
    expected = {name: a.copy() for name, a in expected.items()}
    x["key"][1, 0, :60] = rng.choice((np.nan, np.inf, -np.inf), (60, 16))
    error, got, _ = run(rng, runtime, memory, "certjax_append", shape, x, attributes)
    assert error == ""
    for name, a in got.items():
        np.testing.assert_array_equal(a[[0, 2]].view(np.uint8), expected[name][[0, 2]].view(np.uint8))


def test_the_denominator_of_heads_with_one_heavy_key(memory):
    """The scan's bounds are then up to 10¹⁵ times the denominator, and rounding alone once the key is taken off."""
    rng, runtime = np.random.default_rng(8), Runtime(8)
    shape = Shape((60,), 1, 4, 512, 16, 2)
    x = draw_step(rng, shape, draw_cache(rng, runtime, shape), sane=True)
    x["query"][:] = 2 * rng.standard_normal(x["query"].shape)
    x["key"][:] = 6 * rng.standard_normal(x["key"].shape)
    x["channel_weight"][:] = np.exp(2 * rng.standard_normal(x["channel_weight"].shape))
    encode(runtime, shape, x)
    x["epsilon"][:], x["length"][:], x["hint_wait"][:] = 0.3, 256, 0
    attributes = draw_attributes(rng, 2) | {"measure": np.int32(2), "always_sample": np.bool_(True)}
    attributes |= {"dense": np.bool_(False), "window": np.int64(1), "sinks": np.int64(0), "span": np.int64(0)}
    error, _, r = run(rng, runtime, memory, "certjax_certified_decode", shape, x, attributes)
    assert error == ""
    assert (r["error_bound"] >= 0).all()
    assert checks.check_certified(shape, x, r, attributes, sane=True) > 50


@pytest.mark.slow
def test_many_calls(memory):
    """CERTJAX_FUZZ_CALLS of either kind; another seed draws other calls."""
    calls = int(os.environ.get("CERTJAX_FUZZ_CALLS", "1200"))
    seed = int(os.environ.get("CERTJAX_FUZZ_SEED", "6"))
    for hostile in (False, True):
        count = fuzz(seed, calls, memory, hostile)
        print(f"seed {seed}, {'hostile' if hostile else 'true'} operands:", dict(count))
    rng, runtime = np.random.default_rng(seed), Runtime(seed)
    for _ in range(calls):
        assert draw_refusal(rng, runtime)[2]


@pytest.mark.parametrize("handler", HANDLERS)
def test_the_same_through_xla(handler, memory):
    """Calls without XLA are what XLA's calls are: the same bits, and the same errors."""
    rng, runtime = np.random.default_rng(7), Runtime(7)
    shape = Shape((2, 2), 2, 3, 192, 32, 0)
    cache = draw_cache(rng, runtime, shape)
    attributes = {name: draw_attributes(rng, 0)[name] for name in ATTRIBUTES[handler]}
    aliases = {i: i for i in range(13)} if handler == "certjax_append" else {}
    results = [jax.ShapeDtypeStruct(shape.of(name)[1], shape.of(name)[0]) for name in RESULTS[handler]]
    call = jax.jit(
        lambda *x: jax.ffi.ffi_call(handler, results, input_output_aliases=aliases)(*x, **attributes),
    )
    for _ in range(10):
        x = draw_step(rng, shape, cache, sane=False)
        corrupt(rng, x, OPERANDS[handler])
        got = call(*(jnp.asarray(x[name]) for name in OPERANDS[handler]))
        error, _, expected = run(rng, runtime, memory, handler, shape, x, attributes)
        assert error == ""
        for a, name in zip(got, RESULTS[handler], strict=True):
            np.testing.assert_array_equal(np.asarray(a).view(np.uint8), expected[name].view(np.uint8), err_msg=name)
    operands = [jnp.asarray(x[name]) for name in OPERANDS[handler]]
    operands[-1] = operands[-1][..., None]
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"(active|valid|words|wait) has another dtype or shape"):
        jax.block_until_ready(call(*operands))


def test_refusals():
    rng, runtime = np.random.default_rng(3), Runtime(3)
    for _ in range(600):
        wrong, name, error = draw_refusal(rng, runtime)
        assert error, (wrong, name)
        if wrong in ("rank", "axis", "dtype") and name not in ("query", "key"):
            assert name in error, (wrong, name, error)
        elif wrong in ("rank", "axis", "dtype"):
            assert "another dtype or shape" in error or "must" in error, (wrong, name, error)


def test_results_that_are_not_the_operands_memory_are_refused(memory):
    rng, runtime = np.random.default_rng(4), Runtime(4)
    shape = Shape((2,), 1, 1, 128, 16, 2)
    x = draw_step(rng, shape, draw_cache(rng, runtime, shape), sane=True)
    operands = [x[name] for name in OPERANDS["certjax_append"]]
    before = [a.copy() for a in operands]
    for i in range(13):
        results = operands[:13]
        results[i] = results[i].copy()
        error = runtime.call("certjax_append", operands, results, {"storage": np.int32(2), "isa": np.int32(-1)})
        assert "does not share its operand's memory" in error
    for a, b in zip(operands, before, strict=True):
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


@pytest.mark.parametrize("handler", HANDLERS)
def test_axes_of_size_zero_beside_huge_ones(handler):
    rng, runtime = np.random.default_rng(5), Runtime(5)
    for lead, K, S in (((0,), 1 << 20, 64 << 20), ((1 << 30, 0), 7, 64), ((3,), 0, 64 << 35), ((2,), 2, 0)):
        shape = Shape(lead, K, 3, S, 16, 0)
        x = {name: np.zeros(shape.of(name)[1], shape.of(name)[0]) for name in OPERANDS[handler]}
        attributes = draw_attributes(rng, shape.storage)
        results = [
            x[name] if name in x else np.zeros(shape.of(name)[1], shape.of(name)[0]) for name in RESULTS[handler]
        ]
        mine = {name: attributes[name] for name in ATTRIBUTES[handler]}
        assert runtime.call(handler, list(x.values()), results, mine) == ""


NO_MEMORY = """
import resource, sys
import numpy as np
from tests.shared.ffi_frames import Runtime
from tests.shared.fuzz_cases import ATTRIBUTES, OPERANDS, RESULTS, Shape, draw_attributes

runtime = Runtime(0)
runtime._random.choice = lambda modes: modes[0]

def call(handler, shape, length, valid, limited):
    zeros = lambda name: np.zeros(shape.of(name)[1], shape.of(name)[0])  # pages that nobody touches take no memory
    x = {name: zeros(name) for name in OPERANDS[handler]}
    if "epsilon" in x:
        x["epsilon"][:] = x["delta"][:] = 0.1
    x["length"][:], x["valid"][:] = length, valid
    results = [zeros(name) for name in RESULTS[handler]]
    attributes = draw_attributes(np.random.default_rng(0), shape.storage)
    attributes |= {"window": np.int64(64), "sinks": np.int64(0), "span": np.int64(0), "dense": np.bool_(False)}
    mine = {name: attributes[name] for name in ATTRIBUTES[handler]}
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if limited:
        resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), hard))
    error = runtime.call(handler, list(x.values()), results, mine)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    print(handler, "limited" if limited else "free", error or "done")

many, long = Shape((300_000,), 1, 1, 64, 16, 0), Shape((1,), 1, 16, 1 << 20, 16, 0)
for handler, shape, length, valid in (
    ("certjax_certified_decode", many, 64, False),
    ("certjax_certified_decode", long, 1 << 20, True),
    ("certjax_dense_decode", many, 64, True),
    ("certjax_scan", long, 1 << 20, True),
):
    call(handler, shape, length, valid, True)
    small = Shape((2,), 1, 1, 128, 16, 0)
    call(handler, small, 128, True, False)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits a process's memory as Linux does")
@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer ends the process instead")
def test_no_memory_is_an_error():
    """In the middle of a handler's body, and for the workspace of a step; the next call finds everything in order."""
    done = subprocess.run([sys.executable, "-c", NO_MEMORY], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 8
    assert all("limited no memory" in line for line in lines[::2]), lines
    assert all(line.endswith("free done") for line in lines[1::2]), lines
