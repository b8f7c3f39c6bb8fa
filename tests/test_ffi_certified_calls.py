"""The certified step of the extension under every transform, with bad rows, extreme numbers and wrong arguments."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import certjax
from certjax import _ffi
from certjax.types import Hint
from tests.shared.certified_cases import Case, assert_same_results, draw, no_hint
from tests.shared.ffi_cases import ARRAYS

CASE = Case("float32", 16, 2, lengths=(2048, 2048))
KEY = jax.random.key(0)


def _step(query, cache, words, hint=None, epsilon=0.3, delta=0.01):
    return _ffi.certified_decode(
        query, cache, words, CASE.config(epsilon, delta), no_hint(CASE) if hint is None else hint
    )


def _public(query):
    """[B, K, G, H] with the softmax scale as the public op takes it."""
    B, K, G, H = query.shape
    return query.reshape(B, 1, K * G, H) * jnp.float32(np.sqrt(H))


class TransformTest(chex.TestCase):
    def setUp(self):
        super().setUp()
        self.query, self.cache, self.words, _ = draw(CASE, 4)

    def words_of(self, i):
        return self.words + jnp.asarray(i).astype(jnp.uint32)

    def test_jit_scan_while_and_vmap_give_the_bits_of_eager_calls(self):
        hint, eager = no_hint(CASE), []
        for i in range(4):
            eager.append(_step(self.query, self.cache, self.words_of(i), hint))
            hint = eager[-1][2]
        assert not np.asarray(eager[-1][1].exact).all()
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *eager)

        def body(hint, i):
            result = _step(self.query, self.cache, self.words_of(i), hint)
            return result[2], result

        scanned = jax.jit(lambda hint: jax.lax.scan(body, hint, jnp.arange(4)))(no_hint(CASE))[1]
        assert_same_results(scanned, stacked)

        def more(carry):
            return carry[0] < 4

        def step(carry):
            i, hint, _ = carry
            hint, result = body(hint, i)
            return i + 1, hint, result

        last = jax.jit(lambda carry: jax.lax.while_loop(more, step, carry))((0, no_hint(CASE), eager[0]))
        assert_same_results(last[2], eager[-1])
        self.assertEqual(int(last[0]), 4)

        words = jnp.stack([self.words_of(i) for i in (0, 0)])
        mapped = jax.vmap(lambda words: _step(self.query, self.cache, words))(words)
        assert_same_results(mapped, jax.tree.map(lambda x: jnp.stack([x, x]), eager[0]))

    def test_a_donated_decode_loop_compiles_once_and_updates_in_place(self):
        token = jnp.full((2, 1, 2, 16), 0.1)
        query = _public(self.query)
        config = certjax.Config(epsilon=0.3, delta=0.1, always_sample=True)

        def one(carry):
            i, cache, hint, _ = carry
            cache = certjax.append(cache, token, -token, implementation="native")
            result = certjax.decode_attention(
                query, cache, rng=jax.random.fold_in(KEY, i), config=config, hint=hint, implementation="native"
            )
            return i + 1, cache, result.hint, (result.output, result.certificate)

        capacity = 2112
        grown = certjax.init_cache(batch=2, kv_heads=2, head_dim=16, capacity=capacity, dtype="float32")
        place = lambda new, old: new.at[tuple(map(slice, old.shape))].set(old) if new.shape != old.shape else old
        cache = jax.tree.map(place, grown, self.cache)
        start = (jnp.int32(0), cache, certjax.init_hint(batch=2, heads=4))
        carry = (*start, jax.tree.map(jnp.zeros_like, jax.eval_shape(one, (*start, None))[3]))
        expected = carry
        for _ in range(5):
            expected = one(expected)
        expected = jax.tree.map(np.array, expected)

        chex.clear_trace_counter()
        loop = chex.assert_max_traces(n=1)(lambda c, steps: jax.lax.while_loop(lambda c: c[0] < steps, one, c))
        run = jax.jit(loop, donate_argnums=0)
        carry = jax.tree.map(jnp.array, carry)
        before = [getattr(carry[1], name).unsafe_buffer_pointer() for name in ("key", "value", "codes")]
        for steps in (2, 5):
            carry = run(carry, steps)
        after = [getattr(carry[1], name).unsafe_buffer_pointer() for name in ("key", "value", "codes")]
        self.assertEqual(before, after)
        assert_same_results(carry, expected)

    def test_shard_map_over_kv_heads(self):
        mesh = jax.make_mesh((2,), ("heads",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        axes = {name: P() if name in ("length", "valid") else P(None, "heads") for name in ARRAYS}
        spec, heads = dataclasses.replace(self.cache, **axes), P(None, "heads")
        sharded = jax.jit(jax.shard_map(_step, mesh=mesh, in_specs=(heads, spec, heads, heads), out_specs=heads))
        args = (self.query, self.cache, self.words, no_hint(CASE))
        assert_same_results(sharded(*args), _step(*args))
        assert "all-gather" not in sharded.lower(*args).compile().as_text()

    def test_epsilon_and_delta_are_operands(self):
        run = lambda e, d: _step(self.query, self.cache, self.words, None, e, d)
        chex.clear_trace_counter()

        @jax.jit
        @chex.assert_max_traces(n=1)
        def step(epsilon, delta):
            return run(epsilon, delta)

        few, many, sure = (step(*x)[1] for x in ((0.4, 1e-2), (0.2, 1e-2), (0.4, 1e-9)))
        self.assertLess(int(few.keys_read.sum()), int(many.keys_read.sum()))
        self.assertLess(int(few.keys_read.sum()), int(sure.keys_read.sum()))
        # One for each row, too.
        rows = jax.jit(run)(jnp.asarray([0.4, 0.2]), jnp.float32(1e-2))[1]
        np.testing.assert_array_equal(rows.keys_read[0], few.keys_read[0])
        np.testing.assert_array_equal(rows.keys_read[1], many.keys_read[1])

    def test_no_rows(self):
        empty = jax.tree.map(lambda x: x[:0], (self.query, self.cache, self.words, no_hint(CASE)))
        output, certificate, hint = _step(*empty)
        self.assertEqual(output.shape, (0, 2, 2, 16))
        chex.assert_shape(jax.tree.leaves((certificate, hint)), (0, 2, 2))

    def test_the_public_op_is_the_call(self):
        rng = jax.random.key(3)
        result = certjax.decode_attention(
            _public(self.query),
            self.cache,
            rng=rng,
            config=certjax.Config(epsilon=0.3, delta=0.01, scale=0.25, always_sample=True),
            implementation="native",
        )
        words = certjax.perturbation.row_words(rng, 2, 2)
        query = (_public(self.query) * jnp.float32(0.25)).reshape(2, 2, 2, 16)
        output, certificate, hint = _step(query, self.cache, words)
        flat = lambda x: x.reshape(2, 4)
        assert_same_results(result.output, output.reshape(2, 1, 4, 16))
        assert_same_results((result.certificate, result.hint), jax.tree.map(flat, (certificate, hint)))


UNUSABLE = {
    "certified": False, "exact": False, "error_bound": np.inf, "level": -1, "threshold": -np.inf, "keys_read": 0,
    "candidates": 0, "bytes_read": 0.0, "log_normalizer": np.nan, "value_scale_lower": 0.0,
}  # fmt: skip


def _assert_only_unusable(bad, result, good):
    """Heads `bad` claim nothing; the others are as in `good`."""
    output, certificate, _ = jax.tree.map(np.asarray, result)
    assert np.isnan(output[bad]).all()
    for name, value in UNUSABLE.items():
        got = getattr(certificate, name)
        np.testing.assert_array_equal(got[bad], np.full_like(got[bad], value), err_msg=name)
    keep = lambda x: np.asarray(x)[~bad]
    assert_same_results(jax.tree.map(keep, result[:2]), jax.tree.map(keep, good[:2]))


class BadRowTest(chex.TestCase):
    CASE = Case("float32", 16, 2, lengths=(2048,) * 7)

    def setUp(self):
        super().setUp()
        self.query, self.cache, self.words, _ = draw(self.CASE, 4)
        self.run = lambda query, cache: _ffi.certified_decode(
            query, cache, self.words, self.CASE.config(0.3), no_hint(self.CASE)
        )
        self.good = self.run(self.query, self.cache)

    def test_invalid_rows_and_queries_spoil_no_other(self):
        S = self.cache.capacity
        cache = dataclasses.replace(
            self.cache,
            length=jnp.asarray([2048, 2048, -1, S + 1, 2**31 - 1, 2048, 2048], jnp.int32),
            valid=jnp.asarray([True, False, True, True, True, True, True]),
        )
        query = self.query.at[5, 0, 1, 3].set(jnp.nan).at[6, 1, 0, 15].set(-jnp.inf)
        bad = np.zeros((7, 2, 2), bool)
        bad[1:] = True
        for level in _ffi.isa_levels():
            got = _ffi.certified_decode(query, cache, self.words, self.CASE.config(0.3), no_hint(self.CASE), isa=level)
            _assert_only_unusable(bad, got, self.good)
        self.assertFalse(bool(self.good[1].exact[0].all()))

    @parameterized.parameters(1e37, 1e38, 3e38)
    def test_a_head_that_overflows_spoils_no_other(self, size):
        query = self.query.at[2, 1, 0].set(size)  # a head whose scores are beyond float32
        bad = np.zeros((7, 2, 2), bool)
        bad[2, 1, 0] = True
        result = self.run(query, self.cache)
        np.testing.assert_array_equal(result[1].certified, ~bad)
        assert np.isnan(np.asarray(result[0])[bad]).all()
        for name in ("error_bound", "level", "threshold", "log_normalizer", "value_scale_lower"):
            np.testing.assert_array_equal(np.asarray(getattr(result[1], name))[bad], UNUSABLE[name], err_msg=name)
        others = ~bad
        others[2, 1, 1] = False
        assert_same_results(*(jax.tree.map(lambda x: np.asarray(x)[others], x) for x in (result, self.good)))
        # More rows are read for the other head of its group: that is all that changes there.
        for name in ("exact", "error_bound", "level", "threshold", "keys_read", "log_normalizer", "value_scale_lower"):
            assert_same_results(*(getattr(x[1], name)[2, 1, 1] for x in (result, self.good)))
        assert_same_results(result[0][2, 1, 1], self.good[0][2, 1, 1])

    @parameterized.product(
        numbers=((np.nan, 0.01), (0.0, 0.01), (-1.0, 0.01), (np.inf, 0.01), (1e-30, 0.01), (0.3, np.nan), (0.3, 0.0)),
    )
    def test_senseless_numbers_prove_nothing(self, numbers):
        # Traced, so that Config cannot refuse them: the answer is exact.
        result = jax.jit(
            lambda e, d: _ffi.certified_decode(
                self.query, self.cache, self.words, dataclasses.replace(self.CASE.config(), epsilon=e, delta=d),
                no_hint(self.CASE),
            )
        )(jnp.float32(numbers[0]), jnp.float32(numbers[1]))  # fmt: skip
        self.assertTrue(bool(result[1].certified.all() & result[1].exact.all()))
        dense, log_normalizer = _ffi.dense_decode(self.query, self.cache)
        assert_same_results((result[0], result[1].log_normalizer), (dense, log_normalizer))

    @parameterized.parameters(np.nan, np.inf, -np.inf, 1e9, -1e9, 1e-30)
    def test_senseless_hints(self, level):
        hint = Hint(jnp.full((7, 2, 2), level, jnp.float32), jnp.full((7, 2, 2), -(2**31), jnp.int32))
        output, certificate, _ = _ffi.certified_decode(self.query, self.cache, self.words, self.CASE.config(0.3), hint)
        self.assertTrue(bool(certificate.certified.all()))
        dense, _ = _ffi.dense_decode(self.query, self.cache)
        error = np.linalg.norm(np.asarray(output, np.float64) - dense, axis=-1)
        rounding = 1e-5 * np.linalg.norm(dense, axis=-1)
        assert (error <= np.asarray(certificate.error_bound) + rounding).all()


def _raises(message, call):
    with pytest.raises(ValueError, match=message):
        call()


class WrongArgumentTest(chex.TestCase):
    def setUp(self):
        super().setUp()
        self.query, self.cache, self.words, _ = draw(CASE, 4)

    def test_the_public_op_says_why(self):
        decode = lambda **kw: certjax.decode_attention(
            kw.pop("query", _public(self.query)), self.cache, rng=KEY, implementation="native", **kw
        )
        _raises("head_dim must be|H=16", lambda: decode(query=jnp.zeros((2, 1, 4, 8))))
        _raises("G from 1 to 16", lambda: decode(query=jnp.zeros((2, 1, 34, 16))))
        _raises("hint.level must be", lambda: decode(hint=certjax.init_hint(batch=2, heads=3)))

    def test_the_wrapper_checks_shapes_and_dtypes(self):
        hint = no_hint(CASE)
        _raises(r"query must be \[B=2, K=2, G, H=16\]", lambda: _step(self.query[0], self.cache, self.words))
        _raises("query must be float32", lambda: _step(self.query.astype(jnp.bfloat16), self.cache, self.words))
        _raises("words must be uint32", lambda: _step(self.query, self.cache, self.words.astype(jnp.int32)))
        _raises(r"words must be uint32 \(2, 2, 4\)", lambda: _step(self.query, self.cache, self.words[:1]))
        for name, wrong in (("level", hint.level[:1]), ("wait", hint.wait.astype(jnp.float32))):
            bad = dataclasses.replace(hint, **{name: wrong})
            _raises(f"hint.{name} must be", lambda bad=bad: _step(self.query, self.cache, self.words, bad))

    @parameterized.parameters(*(name for name in ARRAYS if name not in ("key", "dtype")))
    def test_the_handler_does_not_rely_on_the_wrapper(self, name):
        x = getattr(self.cache, name)
        axis = x.ndim - 1
        for wrong in (
            jax.lax.slice_in_dim(x, 0, x.shape[axis] - 1, axis=axis),
            jnp.zeros(x.shape, jnp.int16),
            jnp.zeros((*x.shape, 1), x.dtype),
        ):
            broken = dataclasses.replace(self.cache, **{name: wrong})
            with pytest.raises(jax.errors.JaxRuntimeError, match=f"{name} has another dtype or shape"):
                jax.block_until_ready(_step(self.query, broken, self.words))

    def test_counts_and_attributes_of_the_raw_call(self):
        recorded = {}
        real = jax.ffi.ffi_call

        def record(name, results, **options):
            call = real(name, results, **options)

            def run(*operands, **attributes):
                recorded.update(results=results, operands=operands, attributes=attributes)
                return call(*operands, **attributes)

            return run

        jax.ffi.ffi_call = record
        try:
            _step(self.query, self.cache, self.words)
        finally:
            jax.ffi.ffi_call = real
        results, operands, attributes = recorded["results"], recorded["operands"], recorded["attributes"]
        raw = lambda results, operands, attributes: jax.block_until_ready(
            real("certjax_certified_decode", results)(*operands, **attributes)
        )
        raw(results, operands, attributes)
        wrong = [
            ("operands", results, operands[:-1], {}),
            ("operands", results, (*operands, operands[0]), {}),
            ("operands", results, (), {}),
            ("results", results[:-1], operands, {}),
            ("another dtype or shape", [results[0], results[0], *results[2:]], operands, {}),
            ("at least 4 axes", results, (operands[0][0, 0], *operands[1:]), {}),
            ("measure is unknown", results, operands, {"measure": np.int32(3)}),
            ("window, sinks and span", results, operands, {"window": np.int64(-1)}),
            ("window, sinks and span", results, operands, {"span": np.int64(-(2**63))}),
            ("storage is unknown", results, operands, {"storage": np.int32(9)}),
            ("another dtype or shape", results, operands, {"storage": np.int32(0)}),
            ("is not available", results, operands, {"isa": np.int32(77)}),
            (r"\w", results, operands, {"isa": np.float32(0)}),
        ]
        for message, bad_results, bad_operands, change in wrong:
            with pytest.raises(jax.errors.JaxRuntimeError, match=message):
                raw(bad_results, bad_operands, attributes | change)
        huge = {name: np.int64(2**63 - 1) for name in ("window", "sinks", "span")}
        self.assertTrue(bool(raw(results, operands, attributes | huge)[2].all()))  # all in the window: exact

    def test_cannot_be_differentiated(self):
        with pytest.raises(ValueError, match="certjax_certified_decode"):
            jax.grad(lambda q: _step(q, self.cache, self.words)[0].sum())(self.query)
