import os
import pathlib
import platform
import subprocess
import sys

import jax.numpy as jnp
import pytest
from absl.testing import parameterized

from certjax import _ffi, isa
from certjax.cache import init_cache

X86 = platform.machine() in ("x86_64", "AMD64")

# Bits of cpuid 1 ecx, cpuid 7.0 ebx and ecx, and of xcr0.
OSXSAVE, AVX, FMA, F16C = 1 << 27, 1 << 28, 1 << 12, 1 << 29
AVX2, F, BW, VL = 1 << 5, 1 << 16, 1 << 30, 1 << 31
VNNI, AVX_VNNI = 1 << 11, 1 << 4
YMM_STATE, ZMM_STATE = 0b111, 0b11100111
LEAF1, LEAF7 = OSXSAVE | AVX | FMA | F16C, AVX2 | F | BW | VL


@pytest.mark.skipif(not X86, reason="cpuid is an x86 instruction")
class DecisionTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("all", 7, LEAF1, LEAF7, VNNI, 0, ZMM_STATE, ("scalar", "avx2", "avx512")),
        ("cpu has avx512, system saves ymm only", 7, LEAF1, LEAF7, VNNI, 0, YMM_STATE, ("scalar", "avx2")),
        ("system saves no masks", 7, LEAF1, LEAF7, VNNI, 0, ZMM_STATE & ~0b100000, ("scalar", "avx2")),
        ("system saves sse only", 7, LEAF1, LEAF7, VNNI, 0, 0b011, ("scalar",)),
        ("no osxsave", 7, LEAF1 & ~OSXSAVE, LEAF7, VNNI, 0, ZMM_STATE, ("scalar",)),
        ("no vnni", 7, LEAF1, LEAF7, 0, 0, ZMM_STATE, ("scalar", "avx2")),
        ("no avx512bw", 7, LEAF1, LEAF7 & ~BW, VNNI, 0, ZMM_STATE, ("scalar", "avx2")),
        ("no avx512vl", 7, LEAF1, LEAF7 & ~VL, VNNI, 0, ZMM_STATE, ("scalar", "avx2")),
        ("no avx512f", 7, LEAF1, LEAF7 & ~F, VNNI, 0, ZMM_STATE, ("scalar", "avx2")),
        ("hypervisor hides fma", 7, LEAF1 & ~FMA, LEAF7, VNNI, 0, ZMM_STATE, ("scalar",)),
        ("hypervisor hides f16c", 7, LEAF1 & ~F16C, LEAF7, VNNI, 0, ZMM_STATE, ("scalar",)),
        ("hypervisor hides avx", 7, LEAF1 & ~AVX, LEAF7, VNNI, 0, ZMM_STATE, ("scalar",)),
        ("no avx2", 7, LEAF1, LEAF7 & ~AVX2, VNNI, 0, ZMM_STATE, ("scalar",)),
        ("old cpu without leaf 7", 6, LEAF1, LEAF7, VNNI, 0, ZMM_STATE, ("scalar",)),
        ("avx vnni", 7, LEAF1, AVX2, 0, AVX_VNNI, YMM_STATE, ("scalar", "avx2", "avxvnni")),
        ("both", 7, LEAF1, LEAF7, VNNI, AVX_VNNI, ZMM_STATE, ("scalar", "avx2", "avxvnni", "avx512")),
        ("avx vnni without fma", 7, LEAF1 & ~FMA, AVX2, 0, AVX_VNNI, YMM_STATE, ("scalar",)),
        ("nothing", 0, 0, 0, 0, 0, 0, ("scalar",)),
    )
    def test_levels_of_a_machine(self, max_leaf, leaf1_ecx, leaf7_ebx, leaf7_ecx, leaf71_eax, xcr0, expected):
        assert tuple(_ffi.usable_levels(max_leaf, leaf1_ecx, leaf7_ebx, leaf7_ecx, leaf71_eax, xcr0)) == expected


def test_levels_agree_with_the_kernel_s_view():
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if not X86 or not cpuinfo.exists():
        pytest.skip("needs /proc/cpuinfo of an x86 machine")
    flags = next(line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")).split()
    expected = ["scalar"]
    if {"avx2", "fma", "f16c"} <= set(flags):
        expected.append("avx2")
        if "avx_vnni" in flags:
            expected.append("avxvnni")
        if {"avx512f", "avx512bw", "avx512vl", "avx512_vnni"} <= set(flags):
            expected.append("avx512")
    assert isa.available() == tuple(expected)
    assert {name for name, usable in _ffi.cpu_features().items() if usable} == set(flags) & set(_ffi.cpu_features())


def test_available_levels_are_compiled_and_ascending():
    compiled = _ffi.build_info()["isa_levels"]
    assert [level for level in compiled if level in isa.available()] == list(isa.available())
    assert isa.available()[0] == "scalar"


def test_environment_chooses_and_is_checked(monkeypatch):
    monkeypatch.delenv("CERTJAX_ISA", raising=False)
    assert isa.active() == isa.available()[-1]
    monkeypatch.setenv("CERTJAX_ISA", "scalar")
    assert isa.active() == "scalar"
    monkeypatch.setenv("CERTJAX_ISA", "sse9")
    with pytest.raises(ValueError, match=r"CERTJAX_ISA must be one of .*scalar.*: got 'sse9'"):
        isa.active()
    cache = init_cache(batch=1, kv_heads=1, head_dim=16, capacity=64)
    with pytest.raises(ValueError, match="CERTJAX_ISA must be one of"):
        _ffi.dense_decode(jnp.zeros((1, 1, 1, 16)), cache)
    missing = set(_ffi.build_info()["isa_levels"]) - set(isa.available())
    for level in missing:
        monkeypatch.setenv("CERTJAX_ISA", level)
        with pytest.raises(ValueError, match=f"got '{level}'"):
            isa.active()


def test_argument_beats_environment(monkeypatch):
    monkeypatch.setenv("CERTJAX_ISA", "sse9")
    assert _ffi.resolve_isa("scalar") == "scalar"
    with pytest.raises(ValueError, match="isa must be one of"):
        _ffi.resolve_isa("neon9")


def test_a_bad_environment_does_not_break_the_import():
    code = "from certjax import isa; print(isa.available())"
    env = {**os.environ, "CERTJAX_ISA": "sse9"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert "scalar" in done.stdout
    assert done.stderr == ""
