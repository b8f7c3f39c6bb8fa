"""The public op: validate, choose an implementation, return output, certificate and hint."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from certjax import _ffi, reference
from certjax._dispatch import dispatch
from certjax.perturbation import row_words
from certjax.types import AttentionResult, Certificate, Config, Hint, KVCache, init_hint

IMPLEMENTATIONS = ("native", "xla", "dense")


def choose_implementation(implementation: str | None = None, config: Config | None = None) -> str:
    """The implementation that `decode_attention` uses on a CPU for these arguments.

    None means "native" where the extension loads, else "xla"; "dense" where the
    extension would run without vector instructions, since nothing is faster there. On other platforms than CPUs, None
    runs "xla".

    Raises:
      ValueError: the name is unknown, or the implementation cannot run here; the message says why.
    """
    config = Config() if config is None else config
    loaded, reason = _ffi.is_available()
    match implementation:
        case None if loaded:
            return "native" if _ffi.is_vectorised() else "dense"
        case None:
            return "xla"
        case "native" if not loaded:
            raise ValueError(f'implementation="native" is not available: {reason}')
        case "native" | "xla" | "dense":
            return implementation
        case _:
            raise ValueError(f"implementation must be None or one of {IMPLEMENTATIONS}: got {implementation!r}")


def decode_attention(
    query: jax.Array,
    cache: KVCache,
    *,
    rng: jax.Array,
    config: Config | None = None,
    hint: Hint | None = None,
    implementation: str | None = None,
) -> AttentionResult:
    """Certified attention of one new token over the cache.

    The estimate reads the keys that Exp(1)-perturbed upper bounds of their scores select, weights them by 1 / π, and
    stops at the first level whose certificate proves the error; a head that no level certifies is computed exactly.
    For each call and head, the error exceeds `certificate.error_bound` with probability ≤ δ over the perturbations
    alone, whatever query, keys and values are.

    Args:
      query: [B, 1, N, H] after RoPE, bfloat16, float16 or float32; N a multiple of the cache's K; head n uses kv head
        n // (N // K).
      cache: KVCache that already holds the token's own key and value.
      rng: key made by `jax.random.key`, or one key a row [B]. Must be fresh for every step and layer
        (`jax.random.fold_in`): with the same key twice, nothing is promised over both.
      config: what to promise; `Config()` if None.
      hint: from the previous step of the same layer; affects speed only, and only if rng is fresh.
      implementation: None picks; "xla" runs anywhere; "dense" computes every head exactly; "native" needs the
        extension.

    Returns:
      AttentionResult. Rows of length 0 give zeros and a trivial certificate; rows whose query, keys or values hold
      NaN or inf, and rows that overflowed, give NaN and `certified=False`; so do heads whose scores or sums overflow
      float32, or whose output overflows the query's dtype. Rounding to that dtype is not part of `error_bound`.

    Raises:
      ValueError: wrong ranks, shapes or dtypes; heads that do not divide; an implementation that cannot run.

    Source: reference.py; mathematics in certificate.py and estimator.py.
    """
    config = Config() if config is None else config
    B, K, _, _ = cache.shape
    for name, x in (("epsilon", config.epsilon), ("delta", config.delta)):
        if jnp.shape(x) and (implementation != "native" or jnp.shape(x) != (B,)):
            raise ValueError(
                f'config.{name} must be a scalar, or [B={B}] with implementation="native": got shape {jnp.shape(x)}'
            )
    grouped = _check_query(query, cache, config)
    words = row_words(rng, B, K)
    G = grouped.shape[2]
    hint = init_hint(batch=B, heads=K * G) if hint is None else hint
    for name, dtype in (("level", jnp.float32), ("wait", jnp.int32)):
        x = getattr(hint, name)
        if jnp.shape(x) != (B, K * G) or jnp.result_type(x) != dtype:
            raise ValueError(
                f"hint.{name} must be {jnp.dtype(dtype).name} [B={B}, N={K * G}]: got {jnp.result_type(x)} "
                f"{jnp.shape(x)}; pass the hint of the same layer, or init_hint()"
            )
    hint = jax.tree.map(lambda x: jnp.reshape(x, (B, K, G)), hint)
    chosen: str | None = choose_implementation(implementation, config)
    if chosen == "dense":
        return dense_decode_attention(query, cache, config=config)
    # What makes no difference makes no other program: the scale is in the query already.
    full = config.bounds == "full" and config.measure != "denominator"
    program = dataclasses.replace(config, scale=None, bounds="full" if full else "scalar")

    def native(query, cache, words, hint):
        return _by_head(*_ffi.certified_decode(query, cache, words, program, hint, dtype=dtype), dtype)

    def xla(query, cache, words, hint):
        return _by_head(*_within(dtype, *reference.decode(query, cache, words, program, hint)), dtype)

    dtype = query.dtype
    if implementation is None and G > _ffi.MAX_GROUP:
        chosen = "xla"
    elif implementation is None and chosen == "native":
        chosen = None  # decided when the platform is known
    return dispatch(chosen, native, xla)(grouped, cache, words, hint)


def dense_decode_attention(
    query: jax.Array, cache: KVCache, *, config: Config | None = None, implementation: str | None = None
) -> AttentionResult:
    """Exact attention of one new token over the cache: `jax.nn.dot_product_attention` for T = 1, without repeated keys.

    Args:
      query: as in `decode_attention`.
      cache: KVCache.
      config: only `scale` and `attention_span` matter.
      implementation: None picks "native" on CPU where the extension loads, else "xla".

    Returns:
      AttentionResult whose heads are all exact; the hint knows nothing. Bit-identical for every ISA level and thread
      count.

    Raises:
      ValueError: as `decode_attention`.
    """
    config = Config() if config is None else config
    B, K, _, _ = cache.shape
    grouped = _check_query(query, cache, config)
    G = grouped.shape[2]
    dtype = query.dtype
    hint = jax.tree.map(lambda x: x.reshape(B, K, G), init_hint(batch=B, heads=K * G))
    program = Config(window=config.window, sinks=config.sinks, attention_span=config.attention_span)

    def native(query, cache):
        words = jnp.zeros((B, K, 4), jnp.uint32)
        return _by_head(*_ffi.certified_decode(query, cache, words, program, hint, dense=True, dtype=dtype), dtype)

    def xla(query, cache):
        output, certificate = reference.decode_exactly(query, cache, program)
        return _by_head(*_within(dtype, output, certificate, hint), dtype)

    if implementation is None and (G > _ffi.MAX_GROUP or not _ffi.is_vectorised()):
        implementation = "xla"
    return dispatch(implementation, native, xla)(grouped, cache)


def _within(dtype, output: jax.Array, certificate: Certificate, hint: Hint) -> tuple[jax.Array, Certificate, Hint]:
    """What overflows the query's dtype is not certified."""
    usable = certificate.certified & jnp.isfinite(output.astype(dtype)).all(-1)
    certificate = dataclasses.replace(
        certificate,
        certified=usable,
        exact=certificate.exact & usable,
        error_bound=jnp.where(usable, certificate.error_bound, jnp.inf),
        value_scale_lower=jnp.where(usable, certificate.value_scale_lower, 0),
    )
    return jnp.where(usable[..., None], output, jnp.nan), certificate, hint


def _by_head(output: jax.Array, certificate: Certificate, hint: Hint, dtype) -> AttentionResult:
    """From fields [B, K, G] to [B, N], the output in the query's dtype."""
    B, K, G, H = output.shape
    certificate, hint = jax.tree.map(lambda x: x.reshape(B, K * G), (certificate, hint))
    return AttentionResult(output.reshape(B, 1, K * G, H).astype(dtype), certificate, hint)


def _check_query(query: jax.Array, cache: KVCache, config: Config) -> jax.Array:
    """The query as float32 [B, K, G, H], multiplied by the softmax scale."""
    B, K, _, H = cache.shape
    if query.ndim != 4 or query.shape[0] != B or query.shape[1] != 1 or query.shape[3] != H:
        raise ValueError(f"query must be [B={B}, T=1, N, H={H}]: got {query.shape}")
    if query.shape[2] == 0 or query.shape[2] % K:
        raise ValueError(
            f"query has N={query.shape[2]} heads: must be a positive multiple of the cache's K={K} kv heads"
        )
    if jnp.dtype(query.dtype).name not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"query must be bfloat16, float16 or float32: got {query.dtype}")
    scale = 1 / math.sqrt(H) if config.scale is None else config.scale
    query, _, _ = _no_gradient((query, cache.key, cache.value))
    return query.astype(jnp.float32).reshape(B, K, -1, H) * jnp.float32(scale)


@jax.custom_jvp
def _no_gradient(operands):
    return operands


@_no_gradient.defjvp
def _refuse(primals, tangents):
    raise ValueError(
        "certjax attention cannot be differentiated: it is a decoding op. Train with jax.nn.dot_product_attention, or "
        "wrap the call in jax.lax.stop_gradient"
    )
