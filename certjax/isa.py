"""Which instruction sets the kernels use.

Levels, ascending: "scalar" (the floor of the architecture), "avx2" (AVX2, FMA, F16C), "avxvnni" (also AVX-VNNI),
"avx512" (F, BW, VL, VNNI). A level is available where the processor has every feature it is compiled with and the
operating system saves the registers it needs. All levels give the same bits, so a level only affects speed.

The environment variable `CERTJAX_ISA` names the level to run on, instead of the best one. It is read when a call is
traced; a level that is unknown or not available is a ValueError then.
"""

import pathlib
import re

from certjax import _ffi


def available() -> tuple[str, ...]:
    """The levels that this machine can run, ascending; empty where the compiled extension is missing."""
    return _ffi.isa_levels()


def active() -> str:
    """The level that calls run on.

    Raises:
      ImportError: the compiled extension is not loaded; the message says why.
      ValueError: `CERTJAX_ISA` names a level that is unknown or not available here.
    """
    return _ffi.resolve_isa(None)


def huge_pages() -> str:
    """The machine's setting of transparent huge pages: "always", "madvise", "never" or "unknown"."""
    try:
        text = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    chosen = re.search(r"\[(\w+)\]", text)
    return chosen[1] if chosen else "unknown"
