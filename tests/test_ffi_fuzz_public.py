"""The public functions under random calls: a ValueError, or a right answer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import certjax
from tests.shared import fuzz_checks as checks
from tests.shared.fuzz_cases import OPERANDS, Shape, rows

B, K, G, S, H, T = 8, 2, 2, 256, 16, 250
SHAPE = Shape((B,), K, G, S, H, 2)


@jax.jit
def step(cache, key, value, lengths, tokens, active, query, rng, config, hint):
    """A prefill, three appended tokens, and a decode step."""
    cache = certjax.prefill(cache, key, value, lengths)
    for i in range(3):
        cache = certjax.append(cache, *tokens[:, i], active[i], implementation="native")
    return cache, certjax.decode_attention(query, cache, rng=rng, config=config, hint=hint, implementation="native")


def draw(rng):
    """The arguments of `step`; lengths out of range and numbers that are not finite in some rows."""
    key, value = (
        np.moveaxis(np.clip(rows(rng, (B, K, T + 3, H), sizes), -3e38, 3e38), 1, 2).astype(np.float32)
        for sizes in ((1, 1, 1, 0.1, 10), (1, 1, 0, 1e-30, 1e30))
    )
    lengths = rng.choice((-1, 0, 64, 190, T - 1, T - 1, T, T, T, T, T, T + 1, 2**31 - 1), B).astype(np.int32)
    for x in (key, value):
        odd = rng.random(B) < 0.06
        x[odd, rng.integers(T + 3), rng.integers(K), rng.integers(H)] = rng.choice((np.nan, np.inf, -np.inf))
    query = rng.standard_normal((B, 1, K * G, H)) * rng.choice((0, 0.1, 0.3, 1, 1, 3, 1e20), (B, 1, 1, 1))
    query[rng.random(B) < 0.05, 0, 1, 3] = rng.choice((np.nan, np.inf))
    active = rng.random((3, B)) < 0.8
    tokens = np.stack([x[:, T:].swapaxes(0, 1)[:, :, None] for x in (key, value)])
    level = rng.choice((-1, -1, 3, 1e9, np.nan, np.inf), (B, K * G)).astype(np.float32)
    hint = certjax.Hint(level, np.where(rng.random((B, K * G)) < 0.95, 0, 2**31 - 1).astype(np.int32))
    numbers = rng.choice((0.3, 0.6, 0.9), B), 10.0 ** -rng.uniform(7, 10, B)
    config = certjax.Config(*(jnp.asarray(x, jnp.float32) for x in numbers), window=16, always_sample=True)
    return key[:, :T], value[:, :T], lengths, tokens, active, query.astype(np.float32), config, hint


def test_right_answers():
    rng, sampled = np.random.default_rng(0), 0
    empty = certjax.init_cache(batch=B, kv_heads=K, head_dim=H, capacity=S, dtype=jnp.float32)
    for i in range(12):
        key, value, lengths, tokens, active, query, config, hint = draw(rng)
        cache, result = step(empty, key, value, lengths, tokens, active, query, jax.random.key(i), config, hint)
        valid = (lengths >= 0) & (lengths <= T)
        here = np.arange(T) < lengths[:, None]
        valid &= ((np.isfinite(key) & np.isfinite(value)).all((2, 3)) | ~here).all(1)
        length = np.where(valid, lengths, 0)
        for j in range(3):
            takes = active[j] & valid
            valid &= ~takes | (np.isfinite(tokens[:, j]).all((0, 2, 3, 4)) & (length < S))
            length += takes & valid
        np.testing.assert_array_equal(cache.valid, valid)
        np.testing.assert_array_equal(np.asarray(cache.length)[valid], length[valid])

        scaled = query.reshape(B, K, G, H) * np.float32(1 / np.sqrt(H))
        x = {name: np.asarray(getattr(cache, name)) for name in OPERANDS["certjax_append"] if hasattr(cache, name)}
        x |= {"query": scaled, "epsilon": np.asarray(config.epsilon)}
        fields = {f.name: getattr(result.certificate, f.name) for f in dataclasses.fields(certjax.Certificate)}
        r = {name: np.asarray(a).reshape(B, K, G) for name, a in fields.items()}
        r["out"] = np.asarray(result.output).reshape(B, K, G, H)
        attributes = {"measure": 0, "span": 0, "largest": np.finfo(np.float32).max}
        with np.errstate(all="ignore"):
            sampled += checks.check_certified(SHAPE, x, r, attributes, sane=True)
    assert sampled > 20


def _wrong(rng, shape, dtype):
    """An array that has another rank, another axis or another dtype."""
    shape = list(shape)
    match rng.integers(3 if shape else 2):
        case 0:
            dtype = rng.choice([d for d in ("int8", "uint16", "bool", "complex64", "float8_e4m3fn") if d != dtype])
        case 1:
            shape.insert(rng.integers(len(shape) + 1), rng.choice((0, 1, 5)))
        case _:
            axis = rng.integers(len(shape))
            shape[axis] = int(shape[axis] + rng.choice((-1, 1, 1000)))
    return jax.ShapeDtypeStruct(tuple(int(x) for x in shape), jnp.dtype(str(dtype)))


def test_wrong_arguments():
    """Every argument in turn is wrong; nothing is compiled or run."""
    rng = np.random.default_rng(1)
    struct = lambda *shape, dtype="float32": (shape, dtype)
    calls = {
        certjax.prefill: {
            "key": struct(2, 64, 2, 16),
            "value": struct(2, 64, 2, 16),
            "lengths": struct(2, dtype="int32"),
            "query": struct(2, 64, 4, 16),
        },
        certjax.append: {
            "key": struct(2, 1, 2, 16),
            "value": struct(2, 1, 2, 16),
            "active": struct(2, dtype="bool"),
        },
        certjax.decode_attention: {"query": struct(2, 1, 4, 16), "hint": None},
        certjax.dense_decode_attention: {"query": struct(2, 1, 4, 16)},
    }
    cache = certjax.init_cache(batch=2, kv_heads=2, head_dim=16, capacity=128)
    fields = {"level": struct(2, 4), "wait": struct(2, 4, dtype="int32")}
    make = lambda x: jax.ShapeDtypeStruct(x[0], jnp.dtype(x[1]))
    for call, arguments in calls.items():
        for name in arguments:
            for i in range(15 if name != "lengths" else 10):
                given = {n: make(x) for n, x in arguments.items() if x}
                if name == "hint":
                    parts = {n: make(x) for n, x in fields.items()}
                    parts[("level", "wait")[i % 2]] = _wrong(rng, *fields[("level", "wait")[i % 2]])
                    given["hint"] = certjax.Hint(**parts)
                else:
                    given[name] = _wrong(rng, *arguments[name])
                if _happens_to_be_right(name, given):
                    continue
                more = {"rng": jax.random.key(0)} if call is certjax.decode_attention else {}
                first = (given.pop("query"), cache) if "attention" in call.__name__ else (cache,)
                with pytest.raises(ValueError, match=name if name != "value" else "value|key"):
                    jax.eval_shape(lambda *a, call=call, more=more, **k: call(*a, **k, **more), *first, **given)


def _happens_to_be_right(name, given):
    """Lengths of any integer type; a query of any number of heads that K divides."""
    x = given[name]
    if name == "lengths":
        return x.shape == (2,) and jnp.issubdtype(x.dtype, jnp.integer)
    if name == "query":
        heads = len(x.shape) == 4 and x.shape[2] and x.shape[2] % 2 == 0
        # The dtype of the prefill's query is not looked at: it is converted.
        return heads and (x.shape[0], x.shape[3]) == (2, 16) and (x.dtype == jnp.float32 or "key" in given)
    return False


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("batch", (-1, 1.5, "2", None)),
        ("kv_heads", (0, -1, 2.0)),
        ("head_dim", (0, -16, 8, 24, 528, 32.0)),
        ("capacity", (0, -64, 64.0)),
        ("dtype", ("int8", "float64", "complex64", "bool")),
    ],
)
def test_wrong_sizes_of_a_cache(name, values):
    for value in values:
        with pytest.raises(ValueError, match=name):
            certjax.init_cache(**({"batch": 1, "kv_heads": 1, "head_dim": 16, "capacity": 64} | {name: value}))
