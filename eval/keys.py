"""Keys read per query head on stored attention inputs: ours beside the paper's bounds, in one harness.

    python -m certjax.eval.keys FILE.npz ... [--epsilon 0.1 0.2] [--seeds 8] [--json]

Each file holds `keys`, `values` [K, n, H] after RoPE and `queries` [N, T, H], the newest T positions. The last query
is used; the window is 64. Ours runs as it does in decoding, on the 4-bit bounds, from level 0 (no hint); the paper's
certificate gets exact scores.
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import certjax
from certjax.eval.methods import paper_attend


def measure(path: str | Path, *, epsilon: float, delta: float = 1e-3, seeds: int = 8) -> list[dict]:
    """Mean keys per head, and largest error over the allowed one, for every method on one file.

    Args:
      path: an .npz file as described above.
      epsilon: allowed error, value measure.
      delta: per call.
      seeds: independent draws.

    Returns:
      A row a method: file, method, epsilon, keys_mean, keys_p90, exact_share, largest_error_over_epsilon.

    Raises:
      ValueError: the file lacks an array or the shapes do not fit.
    """
    with np.load(path) as data:
        missing = {"keys", "values", "queries"} - set(data.files)
        if missing:
            raise ValueError(f"{path}: lacks the arrays {sorted(missing)}")
        key, value, query = (np.asarray(data[name], np.float32) for name in ("keys", "values", "queries"))
    K, n, H = key.shape
    if value.shape != key.shape or query.ndim != 3 or query.shape[0] % K or query.shape[2] != H:
        raise ValueError(f"{path}: keys {key.shape}, values {value.shape} and queries {query.shape} do not fit")
    N = query.shape[0]
    heads = [_Head(key[h // (N // K)], value[h // (N // K)], query[h, -1]) for h in range(N)]
    rows = []
    for bounds in ("full", "scalar"):
        # Earlier queries sharpen the score bounds; the one that is measured must not be among them.
        past = np.sqrt((query[:, :-1] ** 2).mean(1))  # [N, H]
        cache = certjax.init_cache(batch=1, kv_heads=K, head_dim=H, capacity=n, dtype=jnp.float32)
        tokens = lambda x: jnp.asarray(x.swapaxes(0, 1))[None]
        cache = certjax.prefill(
            cache, tokens(key), tokens(value), query=jnp.broadcast_to(jnp.asarray(past)[None, None], (1, n, N, H))
        )
        config = certjax.Config(epsilon=epsilon, delta=delta, bounds=bounds, always_sample=True)
        counts, exact, errors = [], [], []
        for seed in range(seeds):
            rng = jax.random.key(seed)
            result = certjax.decode_attention(jnp.asarray(query[:, -1])[None, None], cache, rng=rng, config=config)
            counts.append(np.asarray(result.certificate.keys_read)[0])
            exact.append(np.asarray(result.certificate.exact)[0])
            errors.append(
                [head.error(o) / epsilon for head, o in zip(heads, np.asarray(result.output)[0, 0], strict=True)]
            )
        rows.append(_row(path, f"certjax, {bounds}", epsilon, counts, exact, errors))
    window = np.arange(n) >= n - 64
    counts, exact, errors = [], [], []
    for seed in range(seeds):
        outs = [
            paper_attend(
                head.scores, head.values, window, 1 - np.random.default_rng([seed, h // (N // K)]).random(n),
                epsilon=epsilon, delta=delta, measure="value",
            )
            for h, head in enumerate(heads)
        ]  # fmt: skip
        counts.append([out["keys_read"] for out in outs])
        exact.append([out["exact"] for out in outs])
        errors.append([head.error(out["output"]) / epsilon for head, out in zip(heads, outs, strict=True)])
    rows.append(_row(path, "the paper's bounds", epsilon, counts, exact, errors))
    return rows


class _Head:
    """Scores and exact output of one query head in float64."""

    def __init__(self, key, value, query):
        self.scores = key.astype(np.float64) @ query.astype(np.float64) / np.sqrt(len(query))
        self.values = value.astype(np.float64)
        weight = np.exp(self.scores - self.scores.max())
        weight /= weight.sum()
        self._output = weight @ self.values
        self._scale = np.sqrt(weight @ (self.values**2).sum(-1))

    def error(self, output) -> float:
        """‖output − o‖ / M."""
        return float(np.linalg.norm(np.asarray(output, np.float64) - self._output) / self._scale)


def _row(path, method, epsilon, counts, exact, errors) -> dict:
    return {
        "file": Path(path).stem,
        "method": method,
        "epsilon": epsilon,
        "keys_mean": float(np.mean(counts)),
        "keys_p90": float(np.percentile(counts, 90)),
        "exact_share": float(np.mean(exact)),
        "largest_error_over_epsilon": float(np.max(errors)),
    }


def main() -> None:
    """Prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", metavar="FILE.npz")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[0.1, 0.2])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [
        row
        for path in args.files
        for epsilon in args.epsilon
        for row in measure(path, epsilon=epsilon, seeds=args.seeds)
    ]
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    print("| file | ε | method | keys, mean | keys, p90 | exact | largest error / ε |\n|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            "| {file} | {epsilon} | {method} | {keys_mean:.0f} | {keys_p90:.0f} | {exact_share:.1%} "
            "| {largest_error_over_epsilon:.3f} |".format(**row)
        )


if __name__ == "__main__":
    main()
