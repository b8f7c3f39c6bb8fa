"""`python -m certjax.eval.million`: one layer with a million keys: dense, certified, and vector search.

Synthetic: one kv head, three query heads, d = 64, bfloat16 cache. Keys are normal, independent, with variance
λ_i ∝ 1 / (1 + i) in channel i (mean 1); queries are normal with the same variances, scaled so that a head's scores have
a standard deviation of σ; values are c + normal, c normal and the same for all. The scores of a query are then normal:
with σ = 2 its softmax is broad (some n e^−4 keys count), with σ = 3 a few hundred keys hold most of it.

Error: √(Σ ‖ô − o‖² / Σ ‖o‖²) over queries and heads, against dense attention over the same cache. Keys: mean a query
head, asked of the oracle, or whose value certified attention read; sink 1 and the newest 1024 are exact for everyone.
Time: of a call with all heads, after one with another query; the kinds of attention in turn, median over the queries.
Memory: arrays of the cache (codes and metadata are certified attention's own) and of the index; FAISS's own as it would
be written to a file, and the points that the oracle keeps beside it to grow.
"""

import argparse
import functools
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import certjax
from certjax import retrieval
from certjax.eval.errors import rows_of
from certjax.eval.passes_curve import relative
from certjax.retrieval import host
from certjax.retrieval.faiss_oracles import import_faiss

HEADS, HEAD_DIM, QUERIES = 3, 64, 8
WINDOW, SINKS = 1024, 1
SIGMAS = (2.0, 3.0)
EPSILONS = (0.1, 0.2)


def run(n: int = 1 << 20, *, k: int = 128, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of the table.

    Args:
      n: keys, a multiple of 64.
      k: keys requested of an oracle.
      seed: of everything random.

    Raises:
      ValueError: n that cannot be.
      ImportError: FAISS is missing.

    Memory: about 2 KB a key at the peak.
    """
    if n % 64 or n <= WINDOW + SINKS:
        raise ValueError(f"n must be a multiple of 64 above {WINDOW + SINKS}: got {n}")
    rngs = jax.random.split(jax.random.key(seed), 6)
    spread = np.sqrt(1 / (1 + np.arange(HEAD_DIM)))
    spread *= np.sqrt(HEAD_DIM / (spread**2).sum())
    key = (jax.random.normal(rngs[0], (1, n, 1, HEAD_DIM)) * spread[None, None, None]).astype(jnp.bfloat16)
    center = jax.random.normal(rngs[1], (1, 1, 1, HEAD_DIM))
    value = (center + jax.random.normal(rngs[2], (1, n, 1, HEAD_DIM))).astype(jnp.bfloat16)
    direction = jax.random.normal(rngs[3], (QUERIES, 1, 1, HEADS, HEAD_DIM)) * spread[None, None, None, None]
    unit = (
        direction / jnp.linalg.norm(direction * spread[None, None, None, None], axis=-1, keepdims=True) * HEAD_DIM**0.5
    )
    for _ in range(2):  # the first compiles
        start = time.perf_counter()
        cache = certjax.init_cache(batch=1, kv_heads=1, head_dim=HEAD_DIM, capacity=n, dtype=jnp.bfloat16)
        cache = jax.block_until_ready(certjax.prefill(cache, key, value))
        prefill = time.perf_counter() - start
    rows_bytes = cache.key.nbytes + cache.value.nbytes
    codes = sum(x.nbytes for x in jax.tree.leaves(cache)) - rows_bytes
    keys, values = (rows_of(x[0, 0], cache.dtype) for x in (cache.key, cache.value))

    arms: list[tuple[str, Any, float | None, float]] = [("dense", _dense, None, rows_bytes)]
    for epsilon in EPSILONS:
        config = certjax.Config(epsilon=np.float32(epsilon), window=WINDOW, sinks=SINKS, always_sample=True)
        attend = functools.partial(_certified, config=config)
        arms.append((f"certified, ε = {epsilon:g}", attend, prefill, rows_bytes + codes))
    oracles: dict[str, retrieval.Oracle] = {"Flat": retrieval.Flat(), "IVF": retrieval.IVF()}
    strategy = retrieval.SoftmaxLift(budget=k, window=WINDOW, sinks=SINKS)
    strategy.build(keys, rngs[5])  # compiles the draws
    for name, oracle in oracles.items():
        start = time.perf_counter()
        index = strategy.build(keys, rngs[5], oracle)
        jax.block_until_ready(index)
        seconds = time.perf_counter() - start
        attend = functools.partial(_retrieved, strategy=strategy, keys=keys, values=values, index=index)
        arms.append((f"SoftmaxLift, {name}, k = {k}", attend, seconds, rows_bytes + _index_bytes(index)))

    rows = []
    for sigma in SIGMAS:
        queries = [sigma * unit[i] for i in range(QUERIES)]
        outputs = [np.asarray(_dense(query, cache, None)[0], np.float64) for query in queries]
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name, *_ in arms}
        for i, output in enumerate(outputs):
            for name, attend, *_ in arms:  # in turn: what else the machine does slows all alike
                times = []
                for j in (i - 1, i):  # after another query: nothing of this one's is in the caches but by chance
                    rng = jax.random.fold_in(rngs[4], j % QUERIES)
                    start = time.perf_counter()
                    attended, count = jax.block_until_ready(attend(queries[j], cache, rng))
                    times.append(time.perf_counter() - start)
                found[name].append((np.sum((np.asarray(attended) - output) ** 2), float(np.mean(count)), times[1]))
        for name, _, build, memory in arms:
            errors, keys_read, taken = zip(*found[name], strict=True)
            rows.append(
                {
                    "sigma": sigma, "method": name, "error": relative(errors, np.square(outputs)),
                    "keys": float(np.mean(keys_read)), "seconds": float(np.median(taken)), "build_seconds": build,
                    "bytes": memory,
                }
            )  # fmt: skip
    return rows


@jax.jit
def _dense(query, cache, rng):
    del rng
    return certjax.dense_decode_attention(query, cache).output[0, 0], cache.length


@jax.jit
def _certified(query, cache, rng, *, config):
    result = certjax.decode_attention(query, cache, rng=rng, config=config)
    return result.output[0, 0], result.certificate.keys_read


def _retrieved(query, cache, rng, *, strategy, keys, values, index):
    del cache, rng
    found = strategy.attend(query[0, 0], keys, values, index)
    return found.output, found.keys_requested


def _index_bytes(index: retrieval.Index) -> int:
    total = sum(x.nbytes for x in (index.points, index.exponentials) if x is not None)
    if index.handle is not None:
        searcher: Any = host.registered(index.handle).searcher  # type: ignore[attr-defined]
        total += searcher.points.nbytes + import_faiss().serialize_index(searcher.index).nbytes
    return total


def table(rows: Sequence[dict[str, Any]], n: int) -> str:
    """Markdown."""
    lines = [f"{n} keys", "", "| σ | attention | error | keys | ms a call | build, s | memory, MiB |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in rows:
        build = "–" if row["build_seconds"] is None else f"{row['build_seconds']:.1f}"
        lines.append(
            f"| {row['sigma']:g} | {row['method']} | {row['error']:.4f} | {row['keys']:.0f} | "
            f"{1e3 * row['seconds']:.1f} | {build} | {row['bytes'] / 2**20:.0f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m certjax.eval.million", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--n", type=int, default=1 << 20, help="keys, a multiple of 64 (default: 1048576)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    try:
        print(table(run(args.n, seed=args.seed), args.n))
    except ValueError as error:
        print(f"certjax: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
