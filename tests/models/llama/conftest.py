"""Tiny models take far longer to compile than to run."""

import jax
import pytest


@pytest.fixture(autouse=True)
def quick_compilation(request):
    """Fewer optimisations in fast tests; slow ones see what users get."""
    quick = request.node.get_closest_marker("slow") is None
    jax.config.update("jax_disable_most_optimizations", quick)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
