"""Rules of the native code that a compiler does not check."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
NATIVE = ROOT / "xla_ffi"
LAYERS = ["kernels", "dispatch", "handlers", "module"]  # includes go from right to left only
SOURCES = sorted(p for p in NATIVE.rglob("*") if p.suffix in (".h", ".cc"))
KERNELS = [p for p in SOURCES if p.parent.name == "kernels"]
ISA_FILES = [p for p in KERNELS if p.name.endswith("-inl.h") or p.suffix == ".cc"]
PYTHON = sorted(p for folder in ("certjax", "models", "eval") for p in (ROOT / folder).rglob("*.py"))


def layer(path):
    return path.parent.name if path.parent != NATIVE else "module"


def includes(path):
    return re.findall(r'^#include ["<]([^">]+)[">]', path.read_text(encoding="utf-8"), re.M)


def ids(paths):
    return {"argvalues": paths, "ids": [str(p.relative_to(ROOT)) for p in paths]}


def test_every_layer_has_sources():
    assert {layer(p) for p in SOURCES} == set(LAYERS)
    assert len(ISA_FILES) >= 6


@pytest.mark.parametrize("path", **ids(SOURCES))
def test_includes_go_down(path):
    own = LAYERS.index(layer(path))
    for name in includes(path):
        top = name.split("/")[0]
        if top in LAYERS:
            assert LAYERS.index(top) <= own, f"{path.name} includes {name}"
        if top == "xla":
            assert layer(path) in ("handlers", "module")
        if top in ("nanobind", "Python.h"):
            assert layer(path) == "module"


@pytest.mark.parametrize("path", **ids(ISA_FILES))
def test_isa_files_export_only_their_table(path):
    """What another file could link to would be compiled for a CPU that may not be there."""
    text = path.read_text(encoding="utf-8")
    allowed = {"cstdint", "cstring", "immintrin.h"}
    assert {name for name in includes(path) if "/" not in name} <= allowed
    assert "std::" not in text.replace("std::size_t", "")
    if path.suffix == ".cc":
        code = re.sub(r"^#include .*$|^CERTJAX_DEFINE_KERNELS\(k\w+Kernels\);?$", "", text, flags=re.M)
        assert code.strip() == ""
    elif path.name != "table-inl.h":
        body = text.split("namespace certjax {", 1)[1]
        assert body.lstrip().startswith("namespace {")
        assert re.search(r"}  // namespace\n}  // namespace certjax\n\n#endif", body)
    assert not re.search(r"^(static|thread_local) ", text, re.M)


def test_flags_and_detection_agree():
    """The CPU is asked for exactly the features that a level is compiled with."""
    cmake = (NATIVE / "CMakeLists.txt").read_text(encoding="utf-8")
    flags = {
        level: {flag.replace("vnni", "_vnni") for flag in re.findall(r"-m(\w+)", options)}
        for level, options in re.findall(r"add_kernels\((avx\w+) ([^$]*)\$?", cmake.replace(")", " $"))
    }
    names = re.findall(r'\{"(\w+)", ', (NATIVE / "dispatch/isa.cc").read_text(encoding="utf-8"))
    assert flags == {
        "avx2": set(names[:3]),
        "avxvnni": {*names[:3], "avx_vnni"},
        "avx512": set(names) - {"avx_vnni"},
    }
    assert "-march" not in cmake
    assert "fast-math" not in cmake
    assert "-ffp-contract=off" in cmake


def test_handlers_never_wait():
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        for word in ("condition_variable", "std::thread", "std::async", ".wait(", "BlockUntil", "omp.h"):
            assert word not in text, f"{path.name}: {word}"


def test_one_python_file_knows_the_extension():
    for path in PYTHON:
        text = path.read_text(encoding="utf-8")
        if path.name != "_ffi.py":
            assert "_native" not in text, path
            assert "jax.ffi" not in text, path


def test_no_file_is_longer_than_400_lines():
    for path in [*SOURCES, NATIVE / "CMakeLists.txt"]:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 400, path
