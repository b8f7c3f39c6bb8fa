"""Strict JAX for the whole suite, and several CPU devices for the sharding tests."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import hypothesis
import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("certjax", derandomize=True, deadline=None, print_blob=True, max_examples=25)
hypothesis.settings.load_profile("certjax")
