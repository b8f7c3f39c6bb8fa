"""What a handler's results must be, against attention in float64."""

import numpy as np

from tests.shared.fuzz_cases import FILL, Shape, loaded

MEASURES = ("value", "output", "denominator")


def rounding(products, capacity, head_dim):
    """Relative error of float32 weights and their sums: `_rounding` of reference.py."""
    eta = 2.0**-24 * ((head_dim + 4) * products + 96)
    with np.errstate(over="ignore"):
        return np.expm1(np.minimum(2 * eta, 700)) + 2.0**-24 * 4 * (1024 + 64 + capacity / 4096)


def flat(shape: Shape, x: dict) -> dict:
    """The batch axes as one."""
    rows = int(np.prod(shape.lead))
    return {name: a.reshape(rows, *a.shape[len(shape.lead) :]) for name, a in x.items()}


class Row:
    """The truth about one row and kv head, in float64: [G, …]."""

    def __init__(self, shape: Shape, x: dict, b: int, k: int, span: int):
        n = int(x["length"][b])
        self.first = max(n - span, 0) if span > 0 else 0
        self.n = n
        self.query = x["query"][b, k].astype(np.float64)
        self.key, self.value = (loaded(x[name][b, k, self.first : n]) for name in ("key", "value"))
        self.scores = self.query @ self.key.T
        self.size = np.linalg.norm(self.value, axis=-1)
        self.vmax = self.size.max(initial=0)
        reach = np.linalg.norm(self.key, axis=-1).max(initial=0)
        self.products = np.linalg.norm(self.query, axis=-1) * reach
        self.claimed = np.linalg.norm(self.query, axis=-1) * float(x["key_norm_max"][b, k])
        self.rounding = rounding(self.products, shape.S, shape.H)
        if n == self.first:
            self.out, self.lse = np.zeros(self.query.shape), np.full(len(self.query), -np.inf)
            self.scale = np.zeros(len(self.query))
            return
        top = self.scores.max(-1, keepdims=True)
        weight = np.exp(self.scores - top)
        total = weight.sum(-1, keepdims=True)
        weight /= total
        self.out, self.lse = weight @ self.value, (top + np.log(total))[:, 0]
        self.scale = np.sqrt(weight @ self.size**2)

    def tame(self, g) -> bool:
        """Whether float32 arithmetic has room for this head."""
        return self.claimed[g] < 1e36 and self.vmax < 1e34

    def error(self, out, g) -> float:
        return float(np.linalg.norm(out.astype(np.float64) - self.out[g]))

    def by_rounding(self, g) -> float:
        """What float32 may do to an exact output."""
        return 2 * self.rounding[g] * self.vmax + 1e-43


def usable(shape: Shape, x: dict, b: int) -> bool:
    return bool(x["valid"][b]) and 0 <= int(x["length"][b]) <= shape.S


def check_dense(shape: Shape, x: dict, r: dict, attributes: dict) -> int:
    """Returns the heads that were compared."""
    compared = 0
    for b, k in np.ndindex(len(x["length"]), shape.K):
        row = Row(shape, x, b, k, int(attributes["span"])) if usable(shape, x, b) else None
        for g in range(shape.G):
            out, lse = r["out"][b, k, g], r["log_normalizer"][b, k, g]
            if row is None or (not np.isfinite(row.query[g]).all() and row.n > row.first):
                assert np.isnan(out).all()
                assert np.isnan(lse)
            elif np.isfinite(row.query[g]).all() and row.tame(g) and row.rounding[g] < 0.1:
                assert row.error(out, g) <= row.by_rounding(g)
                assert lse == row.lse[g] or abs(lse - row.lse[g]) <= 2 * row.rounding[g] + 1e-6 * abs(row.lse[g])
                compared += 1
    return compared


def check_certified(shape: Shape, x: dict, r: dict, attributes: dict, sane: bool) -> int:
    """Returns the heads that were sampled."""
    sampled = 0
    for b, k in np.ndindex(len(x["length"]), shape.K):
        good = usable(shape, x, b) and np.isfinite(x["query"][b]).all()
        row = Row(shape, x, b, k, int(attributes["span"])) if good else None
        for g in range(shape.G):
            h = {name: a[b, k, g] for name, a in r.items()}
            pool = (row.n if row else 0) if h["certified"] else 0
            assert 0 <= h["keys_read"] <= h["candidates"] <= pool
            assert h["bytes_read"] >= 0
            if not h["certified"]:
                assert not h["exact"]
                assert np.isnan(h["out"]).all()
                assert h["error_bound"] == np.inf
                assert row is None or not row.tame(g) or row.vmax > attributes["largest"] * (1 - 1e-6)
                continue
            assert row is not None, "an unusable row is certified"
            assert np.isfinite(h["out"]).all()
            if row.rounding[g] >= 0.1 or not row.tame(g):
                assert h["exact"] or not sane or 2 * row.rounding[g] <= 1.001 * x["epsilon"][b], "rounding is too large"
                continue
            error, slack = row.error(h["out"], g), row.by_rounding(g)
            assert h["value_scale_lower"] <= row.scale[g] * (1 + 1e-5) + slack or not sane
            if h["exact"]:
                assert error <= slack
                assert h["error_bound"] == 0
                close = abs(h["log_normalizer"] - row.lse[g]) <= 2 * row.rounding[g] + 1e-6 * abs(row.lse[g])
                assert h["log_normalizer"] == row.lse[g] or close
                continue
            sampled += 1
            if not sane:
                continue
            assert 0 <= h["level"] < 64
            epsilon = float(x["epsilon"][b])
            if MEASURES[attributes["measure"]] == "denominator":
                off = abs(np.expm1(float(h["log_normalizer"]) - row.lse[g]))
                allowed = h["error_bound"] + 1e-6 * (1 + abs(row.lse[g]))
                assert off <= allowed
                assert off <= epsilon * 1.001 + 2 * row.rounding[g] + 1e-6 * (1 + abs(row.lse[g]))
                continue
            assert error <= h["error_bound"] * (1 + 1e-5) + 1e-43
            scale = row.scale[g] if MEASURES[attributes["measure"]] == "value" else np.linalg.norm(row.out[g])
            assert error <= 1.001 * epsilon * scale + 2 * slack
    return sampled


def check_scan(shape: Shape, x: dict, r: dict, attributes: dict) -> None:
    """Every key of the pool has an upper bound of its score, and nothing else has one."""
    window, sinks, span = (int(attributes[name]) for name in ("window", "sinks", "span"))
    for b, k in np.ndindex(len(x["length"]), shape.K):
        upper, reference = r["upper"][b, k], r["reference"][b, k]
        if not (usable(shape, x, b) and np.isfinite(x["query"][b]).all()):
            assert np.isnan(upper).all()
            assert np.isnan(reference).all()
            continue
        row = Row(shape, x, b, k, 0)
        begin = max(row.n - span, 0) if span > 0 else 0
        begin = max(begin, min(sinks, row.n))
        end = max(begin, min(row.n - window, row.n // 64 * 64))
        assert (upper[:, :begin] == -np.inf).all()
        assert (upper[:, end:] == -np.inf).all()
        if begin == end:
            assert (reference == 0).all()
            continue
        tame = row.products < 1e30
        bound = upper[:, begin:end].astype(np.float64) + reference[:, None]
        low = bound < row.scores[:, begin:end] - 1e-6 * np.maximum(row.products, 1e-30)[:, None]
        assert not low[tame].any()


def check_append(shape: Shape, x: dict, y: dict) -> None:
    """`x` before, `y` after: one token in the rows that take it, nothing else anywhere."""
    for b in range(len(x["length"])):
        length, S = int(x["length"][b]), shape.S
        bits = lambda c, name, b=b: c[name][b].reshape(-1).view(np.uint8)
        changed = {name for name in y if not np.array_equal(bits(x, name), bits(y, name))}
        finite = all(np.isfinite(loaded(x[name][b])).all() for name in ("new_key", "new_value"))
        if not x["active"][b] or not x["valid"][b]:
            assert not changed
        elif not 0 <= length < S or not finite:
            assert changed == {"valid"}
            assert not y["valid"][b]
        else:
            assert y["length"][b] == length + 1
            for name in ("key", "value"):
                expected = x[name][b].copy()
                expected[:, length] = x[f"new_{name}"][b]
                assert np.array_equal(bits(y, name), expected.reshape(-1).view(np.uint8))
            block = {"codes", "code_scale", "code_zero", "residual_ratio", "residual_norm", "scale_max"}
            assert not changed & {"valid", "channel_weight", "channel_order", "value_center", "new_key", "new_value"}
            assert (length + 1) % 64 == 0 or not changed & block
            size = np.linalg.norm(loaded(x["new_value"][b]) - x["value_center"][b], axis=-1)
            bound = (y["value_size"][b, :, length].astype(np.uint32) << 16).view(np.float32)
            assert (bound >= size).all()


def check_written(handler: str, x: dict, y: dict, r: dict) -> None:
    """For any operands at all: inputs are as before, results are written, and flags are flags."""
    if handler != "certjax_append":
        for name, a in x.items():
            assert np.array_equal(a.reshape(-1).view(np.uint8), y[name].reshape(-1).view(np.uint8)), name
        for name, a in r.items():
            if a.dtype == bool:
                assert (a.view(np.uint8) <= 1).all(), name
            else:
                unwritten = np.full(a.itemsize, FILL, np.uint8).view(a.dtype)[0]
                assert not (a == unwritten).any(), name
