"""Attention inputs of `certjax bench`: synthetic with stated scores, or stored; and caches made of them.

Synthetic keys and values are i.i.d. N(0, 1) a channel. Every query has length σ√H, so that, given the query, its scores
q·k / √H are i.i.d. N(0, σ²); queries of one head at neighbouring positions have a cosine of about 0.8.

* "diffuse": σ = 1; about n / e keys share the softmax mass.
* "peaked": σ = 3, and for every query head four planted keys, at random places, of score ln n + σ²/2 − ln 4 on average,
  so that the four weigh about as much as all other keys together.
"""

import dataclasses
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import certjax

POSITIONS = 8  # newest positions of a head that are attended; earlier queries sharpen the score bounds
SIGMA = {"diffuse": 1.0, "peaked": 3.0}
SYNTHETIC_HEADS = 2
_CHUNK = 32768  # tokens a prefill call, which bounds its float32 temporaries

Rows = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """Kv heads of one kind and size that are measured together.

    Attributes:
      kind: "real", "diffuse" or "peaked".
      source: where they come from, in words.
      n: keys.
      d: head dim H.
      g: query heads a kv head, G.
      heads: number of kv heads.
      load: yields key [n, H], value [n, H] and query [G, T, H] of one kv head after another, the last query at n − 1.
    """

    kind: str
    source: str
    n: int
    d: int
    g: int
    heads: int
    load: Callable[[], Iterable[Rows]]

    def memory(self) -> int:
        """Estimate of the bytes that measuring takes, the frameworks' float32 temporaries included."""
        element = self.n * self.d
        held = self.heads * (8 * element + element // 2 + 8 * self.n)  # bfloat16 twice, codes, norms
        return held + 24 * element + 100 * self.g * self.n


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """One kv head, ready to be attended.

    Attributes:
      key: bfloat16 [1, 1, n, H], for the calls that take plain arrays.
      value: likewise.
      steps: query float32 [1, 1, G, H] (bfloat16 numbers) and a cache [1, 1, S, H] with the keys up to the query's own
        position, for up to `POSITIONS` consecutive positions; the caches share their buffers.
    """

    key: jax.Array
    value: jax.Array
    steps: tuple[tuple[jax.Array, "certjax.KVCache"], ...]


def synthetic(kind: str, n: int, d: int, g: int) -> Case:
    """Two kv heads of the distribution that the module describes, always the same ones.

    Raises:
      KeyError: unknown kind.
    """
    sigma = SIGMA[kind]

    def load() -> Iterator[Rows]:
        for head in range(SYNTHETIC_HEADS):
            rng = np.random.default_rng([head, n, d, g, round(sigma)])
            key, value, base, noise = (
                rng.standard_normal(shape, np.float32) for shape in ((n, d), (n, d), (g, 1, d), (g, 2 * POSITIONS, d))
            )
            query = base + np.float32(0.5) * noise  # cosine with the base 1 / √1.25, among themselves 0.8
            query *= sigma * np.sqrt(np.float32(d)) / np.linalg.norm(query, axis=-1, keepdims=True)
            if kind == "peaked":
                score = np.log(n) + sigma**2 / 2 - np.log(4)
                heavy = base[:, 0] / np.linalg.norm(base, axis=-1) * np.float32(score / sigma * np.sqrt(1.25))
                key[rng.choice(n, 4 * g, replace=False)] = np.repeat(heavy, 4, 0)
            yield key, value, query

    source = f"scores N(0, {sigma:.0f}²)" + (", 4 keys a query head as heavy as the rest" if kind == "peaked" else "")
    return Case(kind, source, n, d, g, SYNTHETIC_HEADS, load)


def stored(folder: str) -> list[Case]:
    """Cases of the .npz files of a folder; files of one size form one case.

    A file holds `keys`, `values` [K, n, H] after RoPE, scores being q·k / √H, and `queries` [N, T, H], those of the
    newest T positions; N a multiple of K, query head h uses kv head h // (N // K).

    Raises:
      ValueError: no such folder, no files in it, a file that cannot be read, or arrays that do not fit.
    """
    paths = sorted(Path(folder).glob("*.npz"))
    if not paths:
        raise ValueError(f"{folder}: holds no .npz file; give a folder of files with keys, values and queries")
    sizes: dict[tuple[int, int, int], list[tuple[Path, int]]] = {}
    for path in paths:
        key, _, query = read_npz(path)
        K, n, d = key.shape
        sizes.setdefault((n, d, query.shape[0] // K), []).append((path, K))
    return [_stored_case(size, files) for size, files in sorted(sizes.items())]


def _stored_case(size: tuple[int, int, int], files: Sequence[tuple[Path, int]]) -> Case:
    def load() -> Iterator[Rows]:
        for path, _ in files:
            yield from split_heads(*read_npz(path))

    return Case("real", ", ".join(path.stem for path, _ in files), *size, sum(K for _, K in files), load)


def read_npz(path: Path) -> Rows:
    """Keys, values [K, n, H] and queries [N, T, H] of a file; errors as for `stored`."""
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path}: cannot be read as .npz: it is no zip archive, or is cut off")
    with np.load(path) as data:
        missing = {"keys", "values", "queries"} - set(data.files)
        if missing:
            raise ValueError(f"{path}: lacks the arrays {sorted(missing)}")
        try:
            key, value, query = data["keys"], data["values"], data["queries"]
        except (OSError, ValueError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(f"{path}: cannot be read as .npz: {error}") from error
    if (
        key.ndim != 3
        or query.ndim != 3
        or value.shape != key.shape
        or query.shape[0] % key.shape[0]
        or query.shape[2] != key.shape[2]
        or query.shape[1] < 2
        or query.shape[1] > key.shape[1]
    ):
        raise ValueError(
            f"{path}: keys and values must be [K, n, H], queries [N, T, H] with N a multiple of K and 2 ≤ T ≤ n: got "
            f"{key.shape}, {value.shape} and {query.shape}"
        )
    return key, value, query


def split_heads(key: np.ndarray, value: np.ndarray, query: np.ndarray) -> Iterator[Rows]:
    """From keys and values [K, n, H] and queries [N, T, H] to one kv head after another."""
    grouped = query.reshape(key.shape[0], -1, *query.shape[1:])
    yield from zip(key, value, grouped, strict=True)


_prefill = jax.jit(certjax.prefill, donate_argnames=("cache",))


def make_heads(case: Case) -> Sequence[Head]:
    """The case's kv heads in bfloat16."""
    return [_make_head(*rows) for rows in case.load()]


def _make_head(key: np.ndarray, value: np.ndarray, query: np.ndarray) -> Head:
    n, H = key.shape
    G, T, _ = query.shape
    measured = min(POSITIONS, T)
    past = None
    if measured < T:  # what is measured must not tune the bounds
        past = jnp.asarray(np.sqrt(np.square(query[:, :-measured], dtype=np.float32).mean(1)))
    keys, values = (jnp.asarray(x, jnp.bfloat16)[None, None] for x in (key, value))
    cache = certjax.init_cache(batch=1, kv_heads=1, head_dim=H, capacity=n, dtype=jnp.bfloat16)
    for start in range(0, n, _CHUNK):
        tokens = [x[:, :, start : start + _CHUNK].swapaxes(1, 2) for x in (keys, values)]
        hints = None if past is None else jnp.broadcast_to(past[None, None], (1, tokens[0].shape[1], G, H))
        cache = _prefill(cache, *tokens, query=hints)
    queries = jnp.asarray(query[:, T - measured :], jnp.bfloat16).astype(jnp.float32)
    steps = tuple(
        (
            queries[None, None, :, t],
            dataclasses.replace(cache, length=jnp.full((1,), n - measured + 1 + t, jnp.int32)),
        )
        for t in range(measured)
    )
    jax.block_until_ready((keys, values, steps))
    return Head(keys, values, steps)
