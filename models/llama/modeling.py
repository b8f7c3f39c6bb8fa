"""The decoder in Flax NNX: grouped-query attention, SwiGLU, RMS norms; activations in float32, weights as stored."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

import certjax
from certjax.models.llama.config import LlamaConfig
from certjax.models.llama.rope import rotary_tables, rotate

Caches = tuple["certjax.KVCache", ...]
Hints = tuple["certjax.Hint", ...]
Metrics = dict[str, jax.Array]
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]

CERTIFICATE_METRICS = ("certified", "exact", "keys_read", "candidates", "bytes_read")


class DecodeAttention(Protocol):
    """Attention of one decode step over one layer's cache.

    A function that JAX can trace, or another hashable callable.
    """

    def __call__(
        self,
        query: jax.Array,
        cache: "certjax.KVCache",
        *,
        rng: jax.Array,
        hint: "certjax.Hint",
        config: "certjax.Config",
    ) -> "certjax.AttentionResult | tuple[certjax.AttentionResult, Metrics]":
        """Attends query [B, 1, N, H] to the cache, which holds the step's own key already; rng as in `decode_step`.

        Returns:
          An `AttentionResult`, or that and a dict of [B, N] arrays for the statistics of `generate`.
        """
        ...


def _certified(query, cache, *, rng, hint, config):
    return certjax.decode_attention(query, cache, rng=rng, config=config, hint=hint)


def _dense(query, cache, *, rng, hint, config):
    del rng, hint
    return certjax.dense_decode_attention(query, cache, config=config)


_ATTENTION: dict[str, DecodeAttention] = {"certified": _certified, "dense": _dense}


def apply_linear(x: jax.Array, *linears: nnx.Linear) -> list[jax.Array]:
    """What each of the modules makes of float32 x [..., I]; for few rows in one call at the speed of memory."""
    out = list(certjax.project(x, [linear.kernel[...] for linear in linears]))
    for i, linear in enumerate(linears):
        if linear.bias is not None:
            out[i] += jnp.expand_dims(linear.bias[...].astype(jnp.float32), range(x.ndim - 1))
    return out


class Layer(nnx.Module):
    """One decoder layer; how queries meet keys is the caller's choice.

    Args:
      config: the model.
      dtype: dtype of the weights.
      rngs: source of the initial weights.
    """

    def __init__(self, config: LlamaConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, dtype=jnp.float32, param_dtype=dtype, rngs=rngs)
        norm = functools.partial(nnx.RMSNorm, epsilon=config.norm_eps, dtype=jnp.float32, param_dtype=dtype, rngs=rngs)
        query_width, key_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.attention_norm = norm(config.hidden_size)
        self.query = linear(config.hidden_size, query_width, use_bias=config.qkv_bias)
        self.key = linear(config.hidden_size, key_width, use_bias=config.qkv_bias)
        self.value = linear(config.hidden_size, key_width, use_bias=config.qkv_bias)
        self.query_norm = norm(config.head_dim) if config.qk_norm else None
        self.key_norm = norm(config.head_dim) if config.qk_norm else None
        self.output = linear(query_width, config.hidden_size, use_bias=config.output_bias)
        self.mlp_norm = norm(config.hidden_size)
        self.gate = linear(config.hidden_size, config.intermediate_size, use_bias=config.mlp_bias)
        self.up = linear(config.hidden_size, config.intermediate_size, use_bias=config.mlp_bias)
        self.down = linear(config.intermediate_size, config.hidden_size, use_bias=config.mlp_bias)

    def __call__(self, x: jax.Array, rotary: tuple[jax.Array, jax.Array], attend: Attend) -> tuple[jax.Array, Any]:
        """Applies the layer.

        Args:
          x: float32 [B, T, D].
          rotary: cos and sin of the positions, [B, T, H / 2].
          attend: from query [B, T, N, H], key and value [B, T, K, H] to output [B, T, N, H] and anything else.

        Returns:
          float32 [B, T, D], and what else `attend` returned.
        """
        heads = (*x.shape[:2], -1, self.head_dim)
        h = self.attention_norm(x)
        query, key, value = (y.reshape(heads) for y in apply_linear(h, self.query, self.key, self.value))
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        out, rest = attend(rotate(query, *rotary), rotate(key, *rotary), value)
        x = x + apply_linear(out.reshape(*x.shape[:2], -1), self.output)[0]
        gate, up = apply_linear(self.mlp_norm(x), self.gate, self.up)
        return x + apply_linear(nnx.silu(gate) * up, self.down)[0], rest


class Llama(nnx.Module):
    """A decoder of the Llama family (Llama 2 to 3.2, Mistral, Qwen 2 and 3, SmolLM).

    Weights keep the dtype they are given in and are used in float32: XLA emulates bfloat16 arithmetic on most CPUs.
    Decode steps read them as they are (`certjax.project`), so 16-bit weights are fastest there; a prefill widens one
    matrix at a time.

    Args:
      config: the model.
      attention: "certified", "dense", or a `DecodeAttention`; used in decode steps. Prefill is exact always.
      certified_config: what `attention` is given as config; default `certjax.Config()`. Layers with a window get theirs
        in `attention_span`.
      dtype: dtype of the weights.
      rngs: source of the initial weights.

    Raises:
      ValueError: unknown `attention`.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        attention: str | DecodeAttention = "certified",
        certified_config: "certjax.Config | None" = None,
        dtype: jnp.dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.config = nnx.static(config)
        self._set_attention(attention, certified_config)
        table = nnx.initializers.normal(0.02)(rngs.params(), (config.vocab_size, config.hidden_size), dtype)
        self.embedding = nnx.Param(table)
        self.layers = nnx.List([Layer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = nnx.RMSNorm(
            config.hidden_size, epsilon=config.norm_eps, dtype=jnp.float32, param_dtype=dtype, rngs=rngs
        )
        self.head = (
            None
            if config.tied_embeddings
            else nnx.Linear(
                config.hidden_size, config.vocab_size, use_bias=False, dtype=jnp.float32, param_dtype=dtype, rngs=rngs
            )
        )

    def _set_attention(self, attention: str | DecodeAttention, config: "certjax.Config | None") -> None:
        if not callable(attention) and attention not in _ATTENTION:
            raise ValueError(f"attention must be one of {', '.join(_ATTENTION)} or a callable, got {attention!r}")
        self.attention = nnx.static(attention if callable(attention) else _ATTENTION[attention])
        self.certified_config = nnx.static(certjax.Config() if config is None else config)

    def with_attention(
        self, attention: str | DecodeAttention, certified_config: "certjax.Config | None" = None
    ) -> "Llama":
        """The same weights, not copied, with another attention; arguments and errors as for the class."""
        weights, structure = jax.tree.flatten(self)
        model: Llama = jax.tree.unflatten(structure, weights)
        model._set_attention(attention, certified_config)
        return model

    def embed(self, ids: jax.Array) -> jax.Array:
        """Rows of the embedding table, float32 [..., D]; only the rows are widened, never the table."""
        # XLA gathers from a bfloat16 table as float32, and would widen the table before a loop that does so.
        table, ids = jax.lax.optimization_barrier((self.embedding[...], ids))
        return table[ids].astype(jnp.float32)

    def rotary(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Cos and sin of int32 positions [B, T]."""
        return rotary_tables(self.config.rope, self.config.head_dim, positions)

    def logits(self, x: jax.Array) -> jax.Array:
        """Final norm and output projection, [..., D] to float32 [..., V]."""
        x = self.norm(x)
        if self.head is not None:
            return apply_linear(x, self.head)[0]
        return certjax.project(x, [self.embedding[...]], transposed=True)[0]

    def __call__(self, ids: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """Dense causal forward without a cache, for checks: every score of a layer is held at once, N·T² floats a row.

        Args:
          ids: int32 [B, T].
          positions: int32 [B, T], what the rotary embedding is told; default 0 … T − 1.

        Returns:
          float32 logits [B, T, V].
        """
        tokens = jnp.arange(ids.shape[1], dtype=jnp.int32)
        rotary = self.rotary(jnp.broadcast_to(tokens, ids.shape) if positions is None else positions)
        distance = tokens[:, None] - tokens[None, :]
        x = self.embed(ids)
        for layer, window in zip(self.layers, self.config.windows, strict=True):
            mask = (distance >= 0) & (distance < (ids.shape[1] if window is None else window))
            x, _ = layer(x, rotary, functools.partial(_masked_attention, mask))
        return self.logits(x)

    def init_caches(self, batch: int, capacity: int, dtype: Any = jnp.float32) -> Caches:
        """One empty cache a layer: B rows of S tokens, 2·K·H elements a token and layer, and certjax's metadata."""
        config = self.config
        caches = tuple(
            certjax.init_cache(
                batch=batch, kv_heads=config.num_kv_heads, head_dim=config.head_dim, capacity=capacity, dtype=dtype
            )
            for _ in range(config.num_layers)
        )
        return self.beside_weights(caches)

    def beside_weights(self, arrays: Any) -> Any:
        """Commits new arrays to the device that the weights are committed to, if it is a single one.

        Otherwise the first call of a jitted function would do so, and the second would compile anew.
        """
        weight = self.embedding[...]
        alone = getattr(weight, "committed", False) and len(weight.devices()) == 1
        return jax.device_put(arrays, weight.sharding) if alone else arrays

    def init_hints(self, batch: int) -> Hints:
        """One hint a layer that says that nothing is known yet."""
        shape = (batch, self.config.num_heads)
        return tuple(certjax.init_hint(batch=shape[0], heads=shape[1]) for _ in self.layers)

    def decode_step(
        self,
        tokens: jax.Array,
        caches: Caches,
        hints: Hints,
        *,
        rng: jax.Array,
        config: "certjax.Config",
        active: jax.Array | None = None,
    ) -> tuple[jax.Array, Caches, Hints, Metrics]:
        """Feeds one token a row; donate `caches` where this is jitted, or each step copies them.

        Args:
          tokens: int32 [B], at position `caches[0].length`.
          caches: one a layer.
          hints: what the previous step returned, or `init_hints`.
          rng: key of this step, or one a row, [B]; the layers' keys are split off it here.
          config: for the attention; `delta` is that of a single call.
          active: bool [B]; rows that are False append nothing, and their logits mean nothing. Default: all active.

        Returns:
          logits float32 [B, V]; the caches; the hints; statistics, each [L, B, N].
        """
        rotary = self.rotary(caches[0].length[:, None])
        x = self.embed(tokens[:, None])
        new_caches, new_hints, metrics = [], [], []
        # At once: on CPUs a fold_in for every layer takes its time.
        split = functools.partial(jax.random.split, num=len(self.layers))
        keys = jax.vmap(split, out_axes=1)(rng) if rng.shape else split(rng)
        for i, layer in enumerate(self.layers):
            x, (cache, hint, metric) = layer(
                x, rotary, functools.partial(self.attend, i, caches[i], hints[i], keys[i], config, active)
            )
            new_caches.append(cache)
            new_hints.append(hint)
            metrics.append(metric)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *metrics)
        return self.logits(x)[:, 0], tuple(new_caches), tuple(new_hints), stacked

    def attend(self, i, cache, hint, rng, config, active, query, key, value):
        """Appends a token to the cache of layer i and attends; returns the output and (cache, hint, statistics)."""
        if self.config.windows[i] is not None:
            config = dataclasses.replace(config, attention_span=self.config.windows[i])
        cache = certjax.append(cache, key, value, active=active)
        result = self.attention(query, cache, rng=rng, hint=hint, config=config)
        result, extra = result if isinstance(result, tuple) else (result, {})
        metrics = {name: getattr(result.certificate, name) for name in CERTIFICATE_METRICS}
        return result.output, (cache, result.hint, metrics | extra)


def _masked_attention(mask: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, None]:
    """softmax(q·k / √H) v over the True entries of mask [T, T]; keys are shared by the G heads of a group."""
    B, T, N, H = query.shape
    K = key.shape[2]
    grouped = query.reshape(B, T, K, N // K, H)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, key) * jnp.float32(H**-0.5)
    weights = jax.nn.softmax(jnp.where(mask[None, None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("BKGTS,BSKH->BTKGH", weights, value).reshape(B, T, N, H), None
