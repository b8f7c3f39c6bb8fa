"""`certjax doctor`: what certjax found here, so that a report of a problem can start from facts."""

import importlib.metadata
import os
import platform
from collections.abc import Callable

import certjax
from certjax import _ffi, isa

PACKAGES = ("certjax", "jax", "jaxlib", "flax", "orbax-checkpoint", "numpy", "gguf", "safetensors", "tokenizers")


def report() -> list[tuple[str, str]]:
    """Rows (what, value): versions, the extension, ISA levels, threads, huge pages, and what an op would run on."""
    rows = [("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")]
    for name in PACKAGES:
        try:
            rows.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            rows.append((name, "not installed"))
    loaded, reason = _ffi.is_available()
    if loaded:
        build = _ffi.build_info()
        version = ".".join(map(str, build["ffi_api_version"]))
        rows += [
            ("extension", f"loaded; XLA FFI {version}, {build['compiler']}"),
            ("ISA levels compiled", ", ".join(build["isa_levels"])),
            ("ISA levels usable here", ", ".join(isa.available())),
            ("ISA level chosen", _chosen_level()),
        ]
    else:
        rows.append(("extension", f"not loaded: {reason}"))
    rows += [
        ("threads", f"{_ffi.thread_count()} of {os.cpu_count()} CPUs"),
        ("transparent huge pages", isa.huge_pages()),
        ("append, dense decode", "native" if loaded else "xla"),
        ("certified decode", _or_error(certjax.choose_implementation)),
    ]
    return rows


def _chosen_level() -> str:
    asked = os.environ.get("CERTJAX_ISA")
    return _or_error(lambda: isa.active() + (" (CERTJAX_ISA)" if asked else ""))


def _or_error(value: Callable[[], str]) -> str:
    try:
        return value()
    except ValueError as error:
        return f"none: {error}"
