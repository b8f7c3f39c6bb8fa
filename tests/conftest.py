"""Strict JAX for the whole suite, several CPU devices for the sharding tests, and one cache of compiled programs."""

import os
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
# Compilation is most of the suite's time. Read by jax when it is imported, and by every worker and subprocess.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import hypothesis
import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("certjax", derandomize=True, deadline=None, print_blob=True, max_examples=25)
hypothesis.settings.load_profile("certjax")


def pytest_configure(config):
    # What another worker is still writing cannot be read: it is compiled then.
    config.addinivalue_line("filterwarnings", "ignore:Error reading persistent compilation cache entry")
