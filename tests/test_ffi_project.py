"""Products with weights in the extension: against float64 and jnp, on every ISA level, under every transform."""

import re

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import certjax
from certjax import _ffi
from certjax.projection import MAX_ROWS, project
from tests.shared.ffi_cases import DTYPES, LEVELS, on_one_and_two_cpus


def draw(seed, rows, inputs, *outputs, dtype="float32", transposed=False):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((rows, inputs)), jnp.float32)
    shapes = [(o, inputs) if transposed else (inputs, o) for o in outputs]
    return x, [jnp.asarray(rng.standard_normal(shape).astype(jnp.dtype(dtype))) for shape in shapes]


def wide(w, transposed=False):
    w = np.asarray(w).astype(np.float64)
    return w.T if transposed else w


def bits(x):
    return np.asarray(x).view(np.uint32)


class ProductTest(parameterized.TestCase):
    @parameterized.product(dtype=DTYPES, transposed=(False, True), rows=(1, 3, 16))
    def test_matches_float64(self, dtype, transposed, rows):
        for inputs, outputs in ((1, 1), (7, 5), (16, 16), (129, 100), (64, 777), (1000, 33)):
            x, (w,) = draw(inputs, rows, inputs, outputs, dtype=dtype, transposed=transposed)
            (got,) = _ffi.project(x, [w], transposed=transposed)
            x64, w64 = np.asarray(x, np.float64), wide(w, transposed)
            bound = (inputs / 16 + 41) * 2**-24 * (np.abs(x64) @ np.abs(w64))
            self.assertEqual(got.shape, (rows, outputs))
            assert (np.abs(got - x64 @ w64) <= bound).all()

    @parameterized.product(dtype=DTYPES, level=LEVELS, transposed=(False, True))
    def test_levels_and_numbers_of_rows_give_the_same_bits(self, dtype, level, transposed):
        x, ws = draw(1, 7, 75, 201, 64, dtype=dtype, transposed=transposed)
        together = _ffi.project(x, ws, transposed=transposed, isa="scalar")
        for w, expected in zip(ws, together, strict=True):
            for rows in (x, x[2:3]):
                (got,) = _ffi.project(rows, [w], transposed=transposed, isa=level)
                same = expected if rows is x else expected[2:3]
                np.testing.assert_array_equal(bits(got), bits(same))

    @hypothesis.given(
        inputs=st.integers(0, 40), outputs=st.integers(0, 40), rows=st.integers(0, 6), transposed=st.booleans()
    )
    @hypothesis.settings(max_examples=10)
    def test_any_size(self, inputs, outputs, rows, transposed):
        """Small integers: exact in every order. Empty sums are 0."""
        rng = np.random.default_rng(inputs + outputs)
        x = rng.integers(-8, 9, (rows, inputs)).astype(np.float32)
        w = rng.integers(-8, 9, (outputs, inputs) if transposed else (inputs, outputs)).astype(jnp.bfloat16)
        (got,) = _ffi.project(jnp.asarray(x), [jnp.asarray(w)], transposed=transposed)
        np.testing.assert_array_equal(got, x @ wide(w, transposed))

    @parameterized.product(dtype=DTYPES, transposed=(False, True))
    def test_nan_and_infinity_spread_as_in_any_product(self, dtype, transposed):
        x, (w,) = draw(2, 2, 41, 70, dtype=dtype, transposed=transposed)
        x = x.at[1].set(jnp.abs(x[1]))
        w = np.array(w)
        table = w.T if transposed else w
        table[40, 3] = np.nan
        table[40, 64] = np.inf
        table[3, 69] = -np.inf
        clean = _ffi.project(x, [jnp.where(jnp.isfinite(w), w, 0)], transposed=transposed)[0]
        got = np.asarray(_ffi.project(x, [jnp.asarray(w)], transposed=transposed)[0])
        assert np.isnan(got[:, 3]).all()
        np.testing.assert_array_equal(got[1, [64, 69]], [np.inf, -np.inf])
        others = np.setdiff1d(np.arange(70), [3, 64, 69])
        np.testing.assert_array_equal(got[:, others], np.asarray(clean)[:, others])
        nothing = _ffi.project(x.at[0, 0].set(jnp.nan), [jnp.asarray(w)], transposed=transposed)[0]
        assert np.isnan(nothing[0]).all()
        np.testing.assert_array_equal(nothing[1], got[1])
        for level in LEVELS:
            again = _ffi.project(x, [jnp.asarray(w)], transposed=transposed, isa=level)[0]
            np.testing.assert_array_equal(bits(again), bits(got))

    def test_subnormal_products_are_kept(self):
        w = jnp.asarray(np.full((1, 16), 2.0**-100, np.float32)).astype(jnp.bfloat16)
        x = jnp.asarray(np.full((1, 1), 2.0**-40, np.float32))
        np.testing.assert_array_equal(_ffi.project(x, [w])[0], np.full((1, 16), 2.0**-140, np.float32))


SPLIT = """
import hashlib, jax, jax.numpy as jnp, numpy as np
from certjax import _ffi
x = jax.random.normal(jax.random.key(0), (3, 500))
w = jax.random.normal(jax.random.key(1), (500, 2201))
calls = jax.jit(lambda x, w: [_ffi.project(x + i, [w, w[:, :900]]) for i in range(12)])
outs = [*calls(x, w), _ffi.project(x, [w.T], transposed=True)]
data = b"".join(np.asarray(y).tobytes() for out in outs for y in out)
print(hashlib.sha256(data).hexdigest())
"""


def test_one_and_two_threads_give_the_same_bits():
    one, two = on_one_and_two_cpus(SPLIT)
    assert one == two


class PublicTest(chex.TestCase):
    @parameterized.product(dtype=DTYPES, transposed=(False, True))
    def test_the_extension_agrees_with_jnp(self, dtype, transposed):
        x, ws = draw(3, 6, 75, 50, 33, dtype=dtype, transposed=transposed)
        x = x.reshape(2, 3, 75)
        native, xla = (project(x, ws, transposed=transposed, implementation=i) for i in ("native", "xla"))
        chex.assert_trees_all_equal_shapes_and_dtypes(native, xla)
        chex.assert_trees_all_close(native, xla, rtol=1e-5, atol=1e-4)

    def test_rows_and_dtype_decide(self):
        def native(rows, dtype):
            x, ws = draw(4, rows, 32, 64, dtype=dtype)
            return "certjax_project" in jax.jit(project).lower(x, ws).as_text()

        assert native(1, "bfloat16")
        assert native(MAX_ROWS, "float16")
        assert not native(MAX_ROWS + 1, "bfloat16")
        assert native(2, "float32")
        assert not native(1, "float32")

    @chex.variants(with_jit=True, without_jit=True)
    def test_vmap(self):
        x, (w,) = draw(5, 6, 24, 40)
        x = x.reshape(3, 2, 24)
        (expected,) = project(x, [w], implementation="native")
        (got,) = self.variant(jax.vmap(lambda x: project(x, [w], implementation="native")))(x)
        np.testing.assert_array_equal(got, expected)
        nested = jax.vmap(jax.vmap(lambda x: project(x, [w], implementation="native")))
        np.testing.assert_array_equal(self.variant(nested)(x)[0], expected)
        ws = jnp.stack([w, -w, 2 * w])
        for axis in (0, None):
            rows = x if axis == 0 else x[1]
            (got,) = self.variant(jax.vmap(lambda x, w: project(x, [w], implementation="native"), (axis, 0)))(rows, ws)
            one = [project(rows[i] if axis == 0 else rows, [ws[i]], implementation="native")[0] for i in range(3)]
            np.testing.assert_array_equal(got, jnp.stack(one))

    def test_mapping_rows_reads_the_weights_once(self):
        """Mapped rows count as rows: many go to XLA, few share one call."""
        x, ws = draw(6, 40, 16, 16, dtype="bfloat16")
        for rows, calls in ((x[:8], 1), (x, 0)):
            text = jax.jit(jax.vmap(project, (0, None))).lower(rows, ws).as_text()
            assert text.count("@certjax_project") == calls
            assert "while" not in text
            assert "40x16x16" not in text  # no weights for every row

    @parameterized.parameters("float32", "bfloat16")
    def test_gradients_are_those_of_the_product(self, dtype):
        x, ws = draw(7, 3, 20, 30, 10, dtype=dtype)

        def loss(implementation, x, ws):
            a, b = project(x, ws, implementation=implementation)
            return (a**2).sum() + b.sum()

        native, xla = (jax.grad(lambda *a, i=i: loss(i, *a), argnums=(0, 1))(x, ws) for i in ("native", "xla"))
        chex.assert_trees_all_close(native, xla, rtol=1e-5 if dtype == "float32" else 0.01, atol=1e-4)
        expected = jax.grad(lambda x: ((x @ ws[0].astype(x.dtype)) ** 2).sum() + (x @ ws[1].astype(x.dtype)).sum())(x)
        chex.assert_trees_all_close(xla[0], expected, rtol=1e-5, atol=1e-4)

    def test_shard_map_over_the_outputs(self):
        mesh = jax.make_mesh((2,), ("outputs",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        x, (w,) = draw(8, 2, 24, 64, dtype="bfloat16")
        columns = P(None, "outputs")
        sharded = jax.jit(
            jax.shard_map(
                lambda x, w: project(x, [w], implementation="native")[0],
                mesh=mesh,
                in_specs=(P(), columns),
                out_specs=columns,
            )
        )
        np.testing.assert_array_equal(sharded(x, w), project(x, [w], implementation="native")[0])
        assert "all-gather" not in sharded.lower(x, w).compile().as_text()

    def test_a_loop_reads_the_weights_where_they_are(self):
        """No copy and no other dtype of the weights, in or before a loop that uses them."""
        x, ws = draw(9, 1, 96, 96, 96, dtype="bfloat16")
        (table,) = draw(9, 1, 96, 160, dtype="bfloat16", transposed=True)[1]

        def run(x, ws, table, n):
            def step(carry):
                i, x = carry
                a, b = project(x, ws)
                y = project(a + b, [table], transposed=True)[0]
                return i + 1, y[:, :96] / 100

            return jax.lax.while_loop(lambda carry: carry[0] < n, step, (0, x))

        compiled = jax.jit(run).lower(x, ws, table, 3).compile()
        text = compiled.as_text()
        assert text.count("certjax_project") >= 2
        assert not re.findall(
            r"(?:bf16|f32|u16)\[(?:96,96|160,96|96,160)\]\S* (?:copy|convert|fusion|transpose)\(", text
        )
        assert compiled.memory_analysis().temp_size_in_bytes < 96 * 96

    def test_xla_widens_one_matrix_at_a_time(self):
        """Many rows with 16-bit weights: memory for one of them widened, not for all."""
        x, ws = draw(13, MAX_ROWS + 1, 64, *[64] * 12, dtype="bfloat16")

        def chain(x, ws):
            for w in ws:
                (x,) = project(x, [w])
            return x

        compiled = jax.jit(chain).lower(x, ws).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 3 * 4 * 64 * 64

    def test_nothing_to_do(self):
        x, ws = draw(10, 2, 0, 5)
        np.testing.assert_array_equal(project(x, ws)[0], np.zeros((2, 5)))
        assert project(x, []) == ()
        assert project(jnp.zeros((0, 3, 0)), ws)[0].shape == (0, 3, 5)

    def test_wrong_arguments(self):
        x, ws = draw(11, 2, 8, 5)
        for bad_x, bad_ws, message in (
            (x.astype(jnp.bfloat16), ws, r"x must be float32 \[..., I\]: got bfloat16 \(2, 8\)"),
            (jnp.float32(1), ws, r"x must be float32 \[..., I\]: got float32 \(\)"),
            (x, [*ws, ws[0].T], r"weights\[1\] must be \[I, O\] with I=8 as in x: got \(5, 8\)"),
            (x, [ws[0][0]], r"weights\[0\] must be \[I, O\] with I=8 as in x: got \(5,\)"),
            (x, [ws[0].astype(jnp.int32)], r"weights\[0\] must be one of bfloat16, float16, float32: got int32"),
        ):
            with pytest.raises(ValueError, match=message):
                project(bad_x, bad_ws)
        with pytest.raises(ValueError, match=r"weights\[0\] must be \[O, I\] with I=8 as in x: got \(8, 5\)"):
            project(x, ws, transposed=True)
        with pytest.raises(ValueError, match="implementation must be"):
            project(x, ws, implementation="dense")

    def test_without_the_extension_jnp_does_it(self):
        x, ws = draw(12, 2, 8, 5)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_ffi, "_native", None)
            patch.setattr(_ffi, "_reason", "gone")
            chex.assert_trees_all_equal(project(x, ws), project(x, ws, implementation="xla"))
            with pytest.raises(ValueError, match='implementation="native" is not available: gone'):
                project(x, ws, implementation="native")

    def test_it_is_public(self):
        assert certjax.project is project
