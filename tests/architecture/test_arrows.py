"""The arrows of the design: eval → models → certjax → extension; one file each imports Orbax and the extension."""

import ast
import importlib
import pathlib

import pytest

import certjax
from certjax import retrieval

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = {"certjax": ROOT / "certjax", "certjax.models": ROOT / "models", "certjax.eval": ROOT / "eval"}
FILES = [(package, path) for package, folder in FOLDERS.items() for path in sorted(folder.rglob("*.py"))]


def imports(path):
    """Full names that a file imports, at top level or inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def under(name, package):
    return name == package or name.startswith(package + ".")


# Pitfall 27: nothing of transformers.
@pytest.mark.parametrize(("package", "path"), FILES, ids=lambda x: x.name if isinstance(x, pathlib.Path) else x)
def test_arrows(package, path):
    names = set(imports(path))
    third = {name.split(".")[0] for name in names} - {"certjax"}
    assert not third & {"torch", "transformers", "models", "eval", "xla_ffi"}
    if package == "certjax":
        assert not any(under(name, "certjax.models") or under(name, "certjax.eval") for name in names)
        assert not third & {"orbax", "gguf", "safetensors", "tokenizers", "absl"}
        assert "flax" not in third or path.name == "nnx.py"
    if package == "certjax.models":
        assert not any(under(name, "certjax.eval") for name in names)
    if "orbax" in third:
        assert path == ROOT / "models" / "checkpoints.py"
    for module, file in (("faiss", "faiss_oracles.py"), ("pipnn", "partition_graph.py")):
        assert module not in third or path == ROOT / "certjax" / "retrieval" / file
    source = path.read_text(encoding="utf-8")
    if "certjax._native" in source or "ffi_call(" in source:
        assert path == ROOT / "certjax" / "_ffi.py"


@pytest.mark.parametrize(
    "path", [path for _, path in FILES] + sorted((ROOT / "xla_ffi").rglob("*.[ch]*")), ids=lambda p: p.name
)
def test_files_stay_small(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


@pytest.mark.parametrize("package", [certjax, retrieval], ids=lambda x: x.__name__)
def test_public_names_are_documented(package):
    for name in package.__dict__:
        if not name.startswith("_") and not isinstance(getattr(package, name), type(importlib)):
            assert getattr(package, name).__doc__, name
