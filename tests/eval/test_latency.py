"""`certjax bench`: complete tables, methods in turns, inputs as stated, one-line errors. No test looks at a time."""

import json
import subprocess
import sys
import types
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from certjax.eval import bench_inputs, bench_methods, bench_model, bench_plan, bench_report, latency, loading
from certjax.eval.bench_inputs import POSITIONS, make_heads, split_heads, stored, synthetic
from certjax.models import checkpoints
from certjax.models.dummy import dummy_config, dummy_tensors
from certjax.models.llama import load_model, params_from_tensors

N, D, G = 512, 16, 2
TINY = {"n": [str(N)], "d": [D], "g": [G], "kinds": ["peaked"], "repeats": 2}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A tiny run, and the JSON file that it wrote."""
    file = tmp_path_factory.mktemp("bench") / "bench.json"
    return latency.run(**TINY, epsilon=[0.2, 0.3], json_file=str(file)), file


def rows_of(result, method):
    return [row for row in result["rows"] if row["method"].startswith(method)]


def test_the_table_is_complete(measured):
    result, _ = measured
    assert {row["data"] for row in result["rows"]} == {"warm", "cold"}
    for data in ("warm", "cold"):
        names = [(row["method"], row["epsilon"]) for row in result["rows"] if row["data"] == data]
        assert len(names) == len(set(names))
        certified = f"certified ({result['settings']['implementation']})"
        assert {
            ("empty call", None), ("stream read", None), ("random rows, n / 16", None), ("dense", None),
            (certified, 0.2), (certified, 0.3), ("XLA einsum", None), ("jax.nn.dot_product_attention", None),
        } <= set(names)  # fmt: skip
    for row in result["rows"]:
        assert (row["kind"], row["n"], row["d"], row["g"], row["heads"]) == ("peaked", N, D, G, 2)
        cells = [fill(row) for _, _, fill in bench_report.COLUMNS]
        assert all(cells)
        assert not any("nan" in cell or "inf" in cell for cell in cells)
    for name in ("jax", "CPU", "L3 cache", "threads", "transparent huge pages", "extension"):
        assert result["environment"][name]


def test_parts_of_native_steps(measured):
    """A native step that is not exact scans, reads and evaluates; own dense does not; what else is timed has none."""
    result, _ = measured
    native = result["settings"]["implementation"] == "native"
    for row in result["rows"]:
        if not (native and (row["method"] == "dense" or row["epsilon"])):
            assert row["parts"] is row["dense_over_this_kernels"] is None
            continue
        assert set(row["parts"]) == {"scan", "reads", "certificate", "dense"}
        assert all(part >= 0 for part in row["parts"].values())
        if row["method"] == "dense":
            assert row["dense_over_this_kernels"] == 1
            assert row["parts"]["dense"] > row["parts"]["reads"] == row["parts"]["certificate"] == 0
            continue
        assert row["dense_over_this_kernels"] > 0
        assert row["parts"]["scan"] > 0
        assert row["exact_share"] in (0, 1) or row["parts"]["reads"] > 0


def test_numbers_are_what_they_are_called(measured):
    result, _ = measured
    dense = {row["data"]: row for row in rows_of(result, "dense")}
    for row in result["rows"]:
        times = np.array(row["times_us"])
        assert times.shape == (2, 2)  # repetitions, kv heads
        np.testing.assert_allclose(row["time_us"], np.median(times, 0).mean(), rtol=1e-2)
        np.testing.assert_allclose(row["ns_per_key"], row["time_us"] * 1e3 / N, rtol=1e-9)
        np.testing.assert_allclose(row["dense_over_this"], dense[row["data"]]["time_us"] / row["time_us"], rtol=1e-9)
        low, high = row["dense_over_this_interval"]
        assert 0 < low <= high
        np.testing.assert_allclose(row["bytes_share"], row["bytes_read"] / (4 * N * D), rtol=1e-9)
        np.testing.assert_allclose(row["gb_per_s"], row["bytes_read"] / row["time_us"] / 1e3, rtol=1e-9)
    for row in rows_of(result, "certified"):
        assert 0 < row["keys_read"] <= row["candidates"] <= N
        assert 0 <= row["exact_share"] <= 1
    assert [row["bytes_share"] for row in rows_of(result, "random rows")] == [1 / 32] * 2
    assert [row["bytes_share"] for row in rows_of(result, "dense")] == [1.0] * 2


def test_what_is_timed_attends_to_the_same_keys(measured):
    result, _ = measured
    for row in result["rows"]:
        error = row["largest_error_over_scale"]
        match row["method"]:
            case "empty call" | "stream read" | "random rows, n / 16":
                assert error is None
            case "dense":
                assert error < 1e-5
            case method if method.startswith("certified"):
                assert error <= row["epsilon"]
            case _:
                assert error < 2e-2  # bfloat16 weights


def test_json_round_trips(measured):
    result, file = measured
    read = json.loads(file.read_text(encoding="utf-8"))
    assert read["rows"] == result["rows"]
    assert read["environment"] == result["environment"]
    assert read["settings"]["shapes"] == [[D, G]]


@pytest.mark.parametrize("cold", [False, True])
def test_methods_take_turns(cold):
    case = synthetic("diffuse", 256, 16, 1)
    heads = make_heads(case)
    log = []

    def method(name):
        def prepare(head, t, previous):
            index = next(h for h in range(2) if heads[h] is head)

            def call():
                log.append((name, index, t, previous))
                return len(log)

            return call, ()

        return bench_methods.Method(name, prepare, attends=False)

    flush = (lambda: log.append("flush")) if cold else None
    rows = latency.measure(case, heads, [method("dense"), method("other")], 2, flush)
    assert [row["method"] for row in rows] == ["dense", "other"]
    expected, last = [], {}
    for r in range(2):
        for h in range(2):
            for name in ("dense", "other"):
                expected.append((name, h, r, last.get((name, h))))
                before = len(expected)
                if cold:
                    expected += ["flush", (name, 1 - h, r + 1, last.get((name, 1 - h)))]
                expected.append((name, h, r + 1, before))  # the timed call follows the one before it
                last[name, h] = len(expected)
    assert log == expected


def test_perturbations_are_fresh_and_hints_are_passed_on():
    (head, _) = make_heads(synthetic("peaked", 256, 16, 1))
    method = next(m for m in bench_methods.methods("xla", [0.2], 1e-3) if m.epsilon is not None)
    _, first = method.prepare(head, 0, None)
    result = types.SimpleNamespace(hint=jax.tree.map(lambda x: x + jnp.ones_like(x), first[3]))
    _, second = method.prepare(head, 1, result)
    assert not (jax.random.key_data(first[2]) == jax.random.key_data(second[2])).all()
    assert (first[3].level == -1).all()
    assert (second[3].level == 0).all()
    assert int(second[1].length[0]) == int(first[1].length[0]) + 1


def test_parallel_reads_cover_everything(monkeypatch):
    pool, _ = bench_methods._pool()
    monkeypatch.setattr(bench_methods, "_pool", lambda: (pool, 3))
    for size, parts in ((1 << 20, 1), (1 << 24, 3)):
        seen = []
        bench_methods._in_parallel(seen.append, 1000, size)
        assert len(seen) == parts
        assert sorted(i for part in seen for i in range(1000)[part]) == list(range(1000))


@pytest.mark.parametrize(("kind", "sigma"), [("diffuse", 1), ("peaked", 3)])
def test_synthetic_scores_are_as_stated(kind, sigma):
    n = 8192
    for key, value, query in synthetic(kind, n, 64, 3).load():
        assert key.shape == value.shape == (n, 64)
        scores = np.einsum("gth,nh->gtn", query, key) / 8
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        np.testing.assert_allclose(scores.std(-1), sigma, rtol=0.1)
        heaviest = np.sort(weights, -1)[..., -4:].sum(-1).mean()
        if kind == "peaked":
            assert 0.3 < heaviest < 0.8
        else:
            assert heaviest < 0.05
            np.testing.assert_allclose(1 / (weights**2).sum(-1).mean(), n / np.e, rtol=0.2)
        unit = query / np.linalg.norm(query, axis=-1, keepdims=True)
        np.testing.assert_allclose(np.einsum("gth,gsh->gts", unit, unit)[:, 0, 1:].mean(), 0.8, atol=0.1)


def write_npz(path, n=256, K=2, T=12, **changes):
    rng = np.random.default_rng(len(path.name))
    shapes = {"keys": (K, n, D), "values": (K, n, D), "queries": (K * G, T, D)} | changes
    arrays = {name: rng.standard_normal(shape).astype(np.float16) for name, shape in shapes.items() if shape}
    np.savez(path, **arrays)
    return arrays


def test_stored_caches_become_heads(tmp_path):
    first = write_npz(tmp_path / "a.npz")
    write_npz(tmp_path / "bb.npz", K=1)
    write_npz(tmp_path / "longer.npz", n=512)
    small, large = stored(str(tmp_path))
    assert (small.kind, small.n, small.d, small.g, small.heads, small.source) == ("real", 256, D, G, 3, "a, bb")
    assert (large.n, large.heads) == (512, 2)
    heads = make_heads(small)
    assert len(heads) == 3
    np.testing.assert_array_equal(heads[1].key[0, 0].astype(jnp.float32), _rounded(first["keys"][1]))
    np.testing.assert_array_equal(heads[1].value[0, 0].astype(jnp.float32), _rounded(first["values"][1]))
    assert len(heads[1].steps) == POSITIONS
    for t, (query, cache) in enumerate(heads[1].steps):
        assert int(cache.length[0]) == 256 - POSITIONS + 1 + t
        np.testing.assert_array_equal(query[0, 0], _rounded(first["queries"][2:, 12 - POSITIONS + t]))


def _rounded(x):
    return np.asarray(jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"values": None}, r"lacks the arrays \['values'\]"),
        ({"values": (2, 128, D)}, "keys and values must be"),
        ({"queries": (3, 12, D)}, "N a multiple of K"),
        ({"queries": (4, 1, D)}, "2 ≤ T ≤ n"),
        ({"queries": (4, D)}, "must be"),
    ],
)
def test_stored_files_that_do_not_fit(tmp_path, changes, message):
    write_npz(tmp_path / "a.npz", **changes)
    with pytest.raises(ValueError, match=message):
        stored(str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"no zip", b"PK\x03\x04 cut off"])
def test_stored_files_that_are_no_archives(tmp_path, content):
    (tmp_path / "bad.npz").write_bytes(content)
    with pytest.raises(ValueError, match=r"bad\.npz: cannot be read as \.npz"):
        stored(str(tmp_path))


def test_stored_files_with_damaged_arrays(tmp_path):
    with zipfile.ZipFile(tmp_path / "bad.npz", "w") as archive:
        for name in ("keys", "values", "queries"):
            archive.writestr(f"{name}.npy", b"\x93NUMPY\x01\x00 damaged")
    with pytest.raises(ValueError, match=r"bad\.npz: cannot be read as \.npz"):
        stored(str(tmp_path))


def test_what_is_missing_is_said(tmp_path, monkeypatch, capsys):
    """Sizes without a file, files that nobody asked for, and cases that memory is too small for."""
    write_npz(tmp_path / "a.npz")
    monkeypatch.setattr(bench_report, "free_bytes", lambda: 1 << 20)
    result = latency.run(**TINY | {"n": ["512", "1K"], "kinds": ["real", "peaked"]}, cache_dir=str(tmp_path))
    assert result["rows"] == []
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("skipped")] == [
        f"skipped: {line}" for line in result["skipped"]
    ]
    lines = "\n".join(result["skipped"])
    assert "real, n 512: " in lines
    assert "real, n 1024: " in lines
    assert "real, n 256, d 16, g 2 (a): not asked for" in lines
    assert lines.count("of memory") == 2


def test_one_kv_head_cannot_be_cold(tmp_path, monkeypatch):
    write_npz(tmp_path / "a.npz", K=1)
    monkeypatch.setattr(latency, "methods", lambda *_: [bench_methods.Method("dense", _nothing, attends=False)])
    result = latency.run(**TINY | {"n": ["256"], "kinds": ["real"]}, cache_dir=str(tmp_path))
    assert [row["data"] for row in result["rows"]] == ["warm"]
    assert result["skipped"] == ["real, n 256, cold: needs two kv heads, a has one"]


def _nothing(head, t, previous):
    return (lambda: None), ()


@pytest.mark.slow
def test_a_model_makes_caches(tmp_path, monkeypatch):
    """Keys and queries of the first layer equal those of the layer itself, at two sizes of one reading."""
    config = dummy_config(vocab_size=256, max_positions=512)
    model = load_model(params_from_tensors(config, dummy_tensors(config)), config)
    ids = np.random.default_rng(0).integers(0, 256, 600).tolist()
    folder = tmp_path / "model"
    checkpoints.save(folder, params_from_tensors(config, dummy_tensors(config)), {}, {}, {})
    monkeypatch.setattr(bench_model.LlamaConfig, "from_hf", lambda _: config)
    monkeypatch.setattr(loading, "Tokenizer", lambda *_: type("", (), {"encode": lambda _, text: ids})())
    cases, skipped = bench_model.model_cases(str(folder), None, [1024, 256, 320])
    assert [(case.n, case.heads, case.d, case.g) for case in cases] == [(256, 4, 16, 2), (320, 4, 16, 2)]
    assert len(skipped) == 1
    assert "n 1024" in skipped[0]

    positions = jnp.arange(320, dtype=jnp.int32)[None]
    layer, x = model.layers[0], model.embed(jnp.asarray(ids[:320], jnp.int32)[None])
    _, (query, key, value) = layer(x, model.rotary(positions), lambda q, k, v: (q, (q, k, v)))
    for case in cases:
        rows = list(case.load())[: config.num_kv_heads]  # of the first layer
        wanted = split_heads(*(np.asarray(z[0, : case.n]).swapaxes(0, 1) for z in (key, value, query)))
        for got, want in zip(rows, wanted, strict=True):
            for a, b in zip(got, want, strict=True):
                np.testing.assert_allclose(a.astype(np.float32), b[..., -a.shape[-2] :, :], rtol=1e-2, atol=1e-2)
        assert rows[0][2].shape == (2, bench_model.RECORDED, 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": ["many"]}, "n must be a multiple of 64 and at least 256, such as 4096, 4K or 1M: got 'many'"),
        ({"n": ["100"]}, "n must be"),
        ({"n": ["0K"]}, "n must be"),
        ({"d": [24]}, "d must be a multiple of 16"),
        ({"g": [0]}, "g must lie in 1 … 16"),
        ({"epsilon": [1.5]}, "epsilon must lie in"),
        ({"kinds": ["flat"]}, "kinds must be among real, diffuse, peaked: got 'flat'"),
        ({"kinds": ["real"]}, "give --checkpoint or --cache-dir"),
        ({"repeats": 0}, "repeats must be at least 1"),
        ({"implementation": "cuda"}, "implementation must be"),
        ({"checkpoint": "nowhere"}, "nowhere: not a certjax checkpoint"),
        ({"cache_dir": "nowhere"}, r"nowhere: holds no \.npz file"),
        ({"prompt_file": "nothing.txt", "checkpoint": "nowhere"}, "cannot be read"),
        ({"json_file": "nowhere/a.json"}, "there is no folder nowhere"),
        ({"plot_file": "nowhere/a.png"}, "there is no folder nowhere"),
        ({"plot_file": "a.pdf"}, r"must be a \.png or \.svg file"),
    ],
)
def test_a_mistake_is_one_line(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        latency.run(**options)
    assert "\n" not in str(caught.value)


def test_the_command():
    """Options reach `run` (none is taken for an abbreviation of one of absl's); mistakes end in one line."""
    words = [sys.executable, "-m", "certjax.eval.cli", "bench", "--n", "4K", "--d", "64", "--g", "3", "--kinds"]
    done = subprocess.run([*words, "flat"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == "certjax: kinds must be among real, diffuse, peaked: got 'flat'"
    done = subprocess.run([*words, "real", "--fast"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].endswith("unrecognized arguments: --fast")


def test_the_whole_grid():
    options = {"n": None, "d": None, "g": None, "epsilon": None, "kinds": None, "repeats": None, "implementation": None}
    plan = bench_plan.make_plan(full=True, real=True, **options)
    assert list(plan.sizes) == [4096 << i for i in range(9)]
    assert plan.shapes == [(64, 1), (64, 3), (128, 1), (128, 4)]
    assert plan.kinds == ["real", "diffuse", "peaked"]
    quick = bench_plan.make_plan(full=False, real=False, **options)
    assert quick.shapes == [(64, 3), (128, 4)]
    assert quick.kinds == list(bench_inputs.SIGMA)


def test_a_plot_without_matplotlib(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    bench_report.plotter(str(tmp_path / "a.png"))([])
    assert capsys.readouterr().out == "no plot: matplotlib is not installed (pip install certjax[bench])\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_plot(measured, suffix, tmp_path):
    file = tmp_path / f"a.{suffix}"
    bench_report.plotter(str(file))(measured[0]["rows"])
    assert file.stat().st_size > 1000
