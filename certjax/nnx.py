"""Certified attention for `flax.nnx`: an `attention_fn` for the stock `nnx.MultiHeadAttention`.

    attention_fn = certjax.nnx.CertifiedAttention(certjax.Config(epsilon=0.1), rngs=rngs)  # a new one for every layer
    layer = nnx.MultiHeadAttention(8, 512, decode=True, attention_fn=attention_fn, rngs=rngs)
    certjax.nnx.init_cache(layer, (batch, capacity, 512))  # instead of layer.init_cache(...)

A layer that exists already takes it as `layer.attention_fn = nnx.data(attention_fn)`.

A module that writes its own keys and values to a cache needs nothing of this file. It holds a `certjax.KVCache` and a
`certjax.Hint`, each in an `nnx.Cache`, and decodes with

    self.cache.set_value(certjax.append(self.cache.get_value(), key, value))
    result = certjax.decode_attention(query, self.cache.get_value(), rng=self.rngs(), hint=self.hint.get_value())
    self.hint.set_value(result.hint)

(examples/own_module.py is a whole one.)
Import it as `certjax.nnx`; `import certjax` alone does not import flax.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from certjax.attention import choose_implementation, decode_attention
from certjax.cache import append, to_storage
from certjax.cache import init_cache as init_layer_cache
from certjax.types import BLOCK, Certificate, Config, Hint, KVCache, init_hint


class CertifiedAttention(nnx.Module):
    """An `attention_fn` for `nnx.MultiHeadAttention` whose decode steps are certified.

    As attribute of the layer it is a submodule: its state is part of the layer's, passes through `nnx.jit`,
    `nnx.split`, `nnx.scan` and `nnx.vmap`, and is donated with it. Every layer needs one of its own.

    What a call is told by its arguments: one query and a mask is a decode step; anything else (training, a full
    forward) goes to `nnx.dot_product_attention` with all its arguments, dropout included.

    In a decode step the layer passes its whole key and value buffers, and a mask that says how many tokens are true.
    Only the newest token is copied to the certjax cache. If that does not hold the tokens before it (the layer was
    reset, filled, reordered or rewound by other means), the row is copied anew, in this step; it is noticed by the
    number of tokens and by the first, middle and last of them, so call `init_cache` after changing only others.

    A mask may end every row where it likes. Rows whose mask has gaps, differs between heads or is empty are computed by
    `nnx.dot_product_attention` and are not certified: the output obeys the mask, `certified` is False, `error_bound`
    inf.

    The key of a step is the next of an `nnx.RngStream`, with the number of tokens folded in: carry the whole state from
    step to step (`nnx.RngState` too), and use no copy of a layer beside it, or perturbations are used twice and nothing
    is promised over both uses. `is_causal` means nothing for one newest query and is ignored there.

    Memory: the layer keeps its plain buffers, so keys and values are held twice, plus the metadata of `KVCache`. Donate
    the state, or each step copies both; `nnx.scan` over layers copies them anyway.

    Args:
      config: what to promise; `Config()` if None. Numbers only: it is static.
      rngs: an `nnx.Rngs` (stream `certjax`, else its default) or an `nnx.RngStream`; forked here.
      implementation: as in `decode_attention`.

    Attributes:
      cache: `nnx.Cache` of a KVCache, B the product of the layer's batch dimensions; None before `init_cache`.
      hint: `nnx.Cache` of the Hint for the next step.
      certificate: `nnx.Cache` of the Certificate of the last step; nothing is certified before the first.

    Raises:
      ValueError: an implementation that cannot run.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        rngs: nnx.Rngs | nnx.RngStream,
        implementation: str | None = None,
    ):
        choose_implementation(implementation, config)
        self.config = nnx.static(Config() if config is None else config)
        self.implementation = nnx.static(implementation)
        self.rngs = (rngs.certjax if isinstance(rngs, nnx.Rngs) else rngs).fork()
        self.cache: nnx.Cache[KVCache] | None = nnx.data(None)
        self.hint: nnx.Cache[Hint] | None = nnx.data(None)
        self.certificate: nnx.Cache[Certificate] | None = nnx.data(None)

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None = None,
        mask: jax.Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: nnx.Module | None = None,
        is_causal: bool = False,
    ) -> jax.Array:
        """As `nnx.dot_product_attention`.

        Args:
          query: [..., 1, N, H] in a decode step.
          key: [..., S, K, H], the layer's buffer, which holds the newest token already.
          value: [..., S, K, H].
          bias: not in a decode step.
          mask: [..., 1 or N, 1, S] in a decode step.
          broadcast_dropout: not in a decode step, as all of dropout.
          dropout_rng: likewise.
          dropout_rate: likewise; may be above 0 if `deterministic`.
          deterministic: no dropout.
          dtype: of the output; None for that of the query and keys.
          precision: not used in a decode step, which computes in float32.
          module: not in a decode step: there are no attention weights to sow.
          is_causal: see the class.

        Returns:
          [..., 1, N, H] in a decode step.

        Raises:
          ValueError: in a decode step, no cache, or one of other sizes; bias, dropout or sown weights.
        """
        if query.shape[-3] != 1 or mask is None:
            return nnx.dot_product_attention(
                query,
                key,
                value,
                bias=bias,
                mask=mask,
                broadcast_dropout=broadcast_dropout,
                dropout_rng=dropout_rng,
                dropout_rate=dropout_rate,
                deterministic=deterministic,
                dtype=dtype,
                precision=precision,
                module=module,
                is_causal=is_causal,
            )
        if bias is not None:
            raise ValueError("certified attention takes no bias: got one; use another attention_fn for this layer")
        if dropout_rate > 0 and not deterministic:
            raise ValueError(f"certified attention has no dropout, got rate {dropout_rate}: pass deterministic=True")
        if module is not None:
            raise ValueError("certified attention computes no weights to sow: call the layer with sow_weights=False")
        if self.cache is None or self.hint is None or self.certificate is None:
            raise ValueError(
                "one query and a mask is a decode step, and there is no certjax cache: call "
                "certjax.nnx.init_cache(module, input_shape) first, instead of module.init_cache"
            )
        cache = self.cache.get_value()
        *batch, S, K, H = key.shape
        B = math.prod(batch)
        heads = self.hint.get_value().level.shape[1]
        if cache.shape != (B, K, -(-S // BLOCK) * BLOCK, H):
            raise ValueError(
                f"key must be [batch, S, K, H] of the certjax cache, batch and heads {cache.shape[:2]}, capacity "
                f"{cache.capacity}, head dim {cache.shape[3]}: got {key.shape}; call certjax.nnx.init_cache again"
            )
        if query.shape != (*batch, 1, heads, H):
            raise ValueError(f"query must be {(*batch, 1, heads, H)}: got {query.shape}")
        mask = jnp.broadcast_to(mask.astype(bool), (*batch, *mask.shape[-3:-1], S))
        rows = lambda x: x.reshape(B, *x.shape[len(batch) :])
        output, cache, hint, certificate = _step(
            cache,
            self.hint.get_value(),
            rows(query.astype(dtype or jnp.promote_types(query.dtype, key.dtype))),
            rows(key),
            rows(value),
            rows(mask),
            self.rngs(),
            self.config,
            self.implementation,
        )
        self.cache.set_value(cache)
        self.hint.set_value(hint)
        self.certificate.set_value(certificate)
        return output.reshape(query.shape)


certified_attention_fn = CertifiedAttention  # the same by the name of the argument that takes it


def init_cache(module: nnx.Module, input_shape: tuple[int, ...], dtype: Any = jnp.float32) -> None:
    """Makes empty caches for every `nnx.MultiHeadAttention` in a module: the layer's own and certjax's.

    Instead of the layers' own `init_cache`, with the same arguments.

    Args:
      module: the layer, or a model that holds some.
      input_shape: (..., S, features): batch dimensions, and tokens that a row can hold.
      dtype: of the keys and values in both caches; the one that the layer computes in.

    Raises:
      ValueError: no layer has a `CertifiedAttention`, or two have the same one or the same random key; sizes as in
        `certjax.init_cache`.
    """
    layers = [x for _, x in nnx.iter_modules(module) if isinstance(x, nnx.MultiHeadAttention)]
    certified = [x.attention_fn for x in layers if isinstance(x.attention_fn, CertifiedAttention)]
    if not certified:
        raise ValueError(
            f"none of the {len(layers)} nnx.MultiHeadAttention in the module has a certjax.nnx.CertifiedAttention as "
            "attention_fn: set one for every layer"
        )
    if len({id(x) for x in certified}) < len(certified):
        raise ValueError("two layers share one CertifiedAttention: make one for every layer, since it holds its cache")
    keys = [x.rngs.key[...] for x in certified]
    if not any(isinstance(x, jax.core.Tracer) for x in keys):
        data = [jax.random.key_data(x).tolist() for x in keys]
        if any(x in data[:i] for i, x in enumerate(data)):
            raise ValueError("two layers have the same random key: give them one nnx.Rngs, not one seed each")
    B, S = math.prod(input_shape[:-2]), input_shape[-2]
    for layer in layers:
        layer.init_cache(input_shape, dtype)
        if isinstance(layer.attention_fn, CertifiedAttention):
            cache = init_layer_cache(
                batch=B, kv_heads=layer.num_kv_heads, head_dim=layer.head_dim, capacity=S, dtype=dtype
            )
            layer.attention_fn.cache = nnx.Cache(cache)
            layer.attention_fn.hint = nnx.Cache(init_hint(batch=B, heads=layer.num_heads))
            layer.attention_fn.certificate = nnx.Cache(_no_certificate(B, layer.num_heads))


@functools.partial(jax.jit, static_argnames=("config", "implementation"))  # one program outside jit too
def _step(
    cache: KVCache,
    hint: Hint,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array,
    rng: jax.Array,
    config: Config,
    implementation: str | None,
) -> tuple[jax.Array, KVCache, Hint, Certificate]:
    """Attends query [B, 1, N, H] to the tokens of key and value [B, S, K, H] that mask [B, 1 or N, 1, S] allows."""
    count = mask.sum(-1, dtype=jnp.int32)[:, 0, 0]  # [B]
    allowed = jnp.arange(mask.shape[-1])[None] < count[:, None]
    prefix = (mask == allowed[:, None, None]).all((1, 2, 3)) & (count > 0)
    seen = jnp.where(cache.valid, cache.length, cache.length + 1)  # an invalid row has refused one more
    cache = _forget(cache, prefix & ((seen > count) | ~_same_tokens(cache, key, value)))

    def behind(cache):
        return prefix & cache.valid & (cache.length < count)

    def add_next(cache):
        token = lambda x: jnp.take_along_axis(x, cache.length[:, None, None, None], axis=1, mode="clip")
        kind = None if implementation == "dense" else implementation
        return append(cache, token(key), token(value), behind(cache), implementation=kind)

    # The first is not in the loop, whose carry would be copied under vmap.
    cache = jax.lax.while_loop(lambda cache: behind(cache).any(), add_next, add_next(cache))

    # The count keeps keys apart where the stream's own state was not carried on.
    rng = jax.random.fold_in(rng, count.max(initial=0))
    result = decode_attention(query, cache, rng=rng, config=config, hint=hint, implementation=implementation)

    def dense(state):
        # A loop of at most one turn, where a cond would always take both branches under vmap.
        output = nnx.dot_product_attention(query, key, value, mask=mask).astype(query.dtype)
        return jnp.bool(False), jnp.where(prefix[:, None, None, None], state[1], output)

    _, output = jax.lax.while_loop(lambda state: state[0], dense, (~prefix.all(), result.output))
    nothing = _no_certificate(*query.shape[:3:2])
    keep = lambda x, y: jnp.where(prefix[:, None], x, y)
    return output, cache, result.hint, jax.tree.map(keep, result.certificate, nothing)


def _same_tokens(cache: KVCache, key: jax.Array, value: jax.Array) -> jax.Array:
    """Whether the first, middle and last token of each row are those in key and value [B, S, K, H]: bool [B]."""
    last = jnp.clip(cache.length - 1, 0, key.shape[1] - 1)
    at = jnp.stack([jnp.zeros_like(last), last // 2, last], axis=1)
    equal = [
        to_storage(jnp.take_along_axis(new, at[:, :, None, None], axis=1, mode="clip"), cache.dtype)
        == jnp.take_along_axis(held, at[:, None, :, None], axis=2, mode="clip").swapaxes(1, 2)
        for new, held in ((key, cache.key), (value, cache.value))
    ]
    return jnp.where(cache.length > 0, (equal[0] & equal[1]).all((1, 2, 3)), cache.valid)


def _forget(cache: KVCache, rows: jax.Array) -> KVCache:
    """The cache with some rows [B] empty; what depends on the capacity stays, since nothing refers to it."""
    B, K, _, H = cache.shape
    empty = init_layer_cache(batch=B, kv_heads=K, head_dim=H, capacity=1, dtype=cache.dtype)
    names = ("scale_max", "key_norm_max", "channel_weight", "channel_order", "value_center", "length", "valid")

    def of(name):
        old, new = getattr(cache, name), getattr(empty, name)
        return jnp.where(rows.reshape(B, *(1 for _ in old.shape[1:])), new, old)

    return dataclasses.replace(cache, **{name: of(name) for name in names})


def _no_certificate(B: int, N: int) -> Certificate:
    """The certificate that claims nothing; every field a buffer of its own, to be donated."""
    fill = lambda value, dtype: jnp.full((B, N), value, dtype)
    return Certificate(
        certified=fill(False, bool),
        exact=fill(False, bool),
        error_bound=fill(jnp.inf, jnp.float32),
        level=fill(-1, jnp.int32),
        threshold=fill(-jnp.inf, jnp.float32),
        keys_read=fill(0, jnp.int32),
        candidates=fill(0, jnp.int32),
        bytes_read=fill(0, jnp.float32),
        log_normalizer=fill(jnp.nan, jnp.float32),
        value_scale_lower=fill(0, jnp.float32),
    )
