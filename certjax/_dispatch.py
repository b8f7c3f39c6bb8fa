"""Picks between the extension and jnp, and says why where a choice is impossible."""

from collections.abc import Callable
from typing import Any

import jax

from certjax import _ffi


def dispatch(implementation: str | None, native: Callable[..., Any], xla: Callable[..., Any]) -> Callable[..., Any]:
    """The function to call.

    Args:
      implementation: None for `native` on CPU where the extension loads and `xla` elsewhere; "native" or "xla" to
        force one.
      native: calls the extension; CPU only.
      xla: the same in jnp.

    Raises:
      ValueError: the name is unknown, or "native" was asked for and the extension does not load (with the reason).
    """
    loaded, reason = _ffi.is_available()
    match implementation:
        case "xla":
            return xla
        case "native":
            if not loaded:
                raise ValueError(f'implementation="native" is not available: {reason}')
            return native
        case None if not loaded:
            return xla
        case None:
            return lambda *args: jax.lax.platform_dependent(*args, cpu=native, default=xla)
        case _:
            raise ValueError(f'implementation must be None, "native" or "xla": got {implementation!r}')
