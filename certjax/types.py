"""The data that passes between calls: frozen dataclasses, registered as pytrees.

Axis letters, the same everywhere (as in ``jax.nn.dot_product_attention``): B batch rows, T query
length, S cache capacity, N query heads, K kv heads, G = N // K, H head dim, P = S // BLOCK.
"""

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

BLOCK = 64  # keys that share one scale and one zero per channel
LANES = 16  # keys side by side in a 64-byte line of codes

Measure = Literal["value", "output", "denominator"]
Bounds = Literal["auto", "scalar", "full"]

STORAGE = {"bfloat16": jnp.uint16, "float16": jnp.float16, "float32": jnp.float32}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """What is promised, and how. `epsilon` and `delta` may be traced scalars, or [B] with
    `implementation="native"`; everything else is static.

    Attributes:
      epsilon: allowed error, relative to the scale of the measure, in (0, 1).
      delta: probability with which a certified call may exceed it, per query head and step, in (0, 1).
      measure: "value" ‖ô − o‖ ≤ ε M with M² = Σ a_i ‖v_i‖²; "output" ‖ô − o‖ ≤ ε ‖o‖; "denominator" |D̂ − D| ≤ ε D.
      bounds: "scalar" (tier 1 of the certificate), "full" (both tiers: fewer keys, more arithmetic), "auto" (what is
        fastest: tier 1, since the jnp implementation visits every key whatever the certificate needs).
      window: newest tokens that are always read exactly, besides those that do not yet fill a block.
      sinks: oldest tokens that are always read exactly.
      attention_span: attend the newest `attention_span` tokens only (sliding-window layers); None for all.
      scale: factor on q·k before the softmax; None for 1/√H.
      always_sample: sample wherever a level certifies, even where exact attention would cost less (for audits); False
        lets the cost model of cost.py choose.

    Raises:
      ValueError: a value out of its range, naming the field.
    """

    epsilon: Any = 0.1
    delta: Any = 1e-3
    measure: Measure = dataclasses.field(default="value", metadata={"static": True})
    bounds: Bounds = dataclasses.field(default="auto", metadata={"static": True})
    window: int = dataclasses.field(default=64, metadata={"static": True})
    sinks: int = dataclasses.field(default=0, metadata={"static": True})
    attention_span: int | None = dataclasses.field(default=None, metadata={"static": True})
    scale: float | None = dataclasses.field(default=None, metadata={"static": True})
    always_sample: bool = dataclasses.field(default=False, metadata={"static": True})

    def __post_init__(self):
        """Checks what is concrete; traced numbers pass (JAX rebuilds the dataclass around tracers)."""
        for name in ("epsilon", "delta"):
            x = getattr(self, name)
            if isinstance(x, (int, float, np.number)) and not 0 < x < 1:
                raise ValueError(f"{name} must lie in (0, 1): got {x}")
        for name, allowed in (("measure", Measure), ("bounds", Bounds)):
            if getattr(self, name) not in get_args(allowed):
                raise ValueError(f"{name} must be one of {get_args(allowed)}: got {getattr(self, name)!r}")
        for name, low in (("window", 0), ("sinks", 0), ("attention_span", 1)):
            x = getattr(self, name)
            if not (x is None and name == "attention_span") and not (isinstance(x, int) and x >= low):
                raise ValueError(f"{name} must be an integer of at least {low}: got {x!r}")
        if not isinstance(self.always_sample, bool):
            raise ValueError(f"always_sample must be True or False: got {self.always_sample!r}")
        if self.scale is not None and not 0 < self.scale < float("inf"):
            raise ValueError(f"scale must be positive and finite: got {self.scale}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class KVCache:
    """Keys, values and the metadata of one layer. Make one with `certjax.init_cache`.

    bfloat16 keys and values are stored as their bits in uint16: XLA on CPU rewrites a whole bfloat16
    buffer to update one row of it, and leaves integers alone. The keys of a row that belong to a full
    block carry 4-bit codes; `length` says how many rows of `key` and `value` are true.

    Attributes:
      key: [B, K, S, H], bfloat16 bits (uint16), float16 or float32.
      value: the same.
      codes: uint8 [B, K, P, BLOCK // 16, H // 8, 64], 4-bit codes (layout: quantization.py).
      code_scale: uint8 [B, K, P, H], the step of a channel in a block, 5 exponent and 3 mantissa bits.
      code_zero: int8 [B, K, P, H], the zero of a channel in a block, in units of its step.
      residual_ratio: float32 [B, K, P], largest |key − decoded key| of the block ÷ (step / 2), rounded up.
      residual_norm: uint16 [B, K, S], bfloat16 bits, ‖channel_weight · (key − decoded key)‖, rounded up.
      value_size: uint16 [B, K, S], bfloat16 bits, ‖value − value_center‖, rounded up.
      value_norm: uint16 [B, K, S], bfloat16 bits, ‖value‖ (feeds predictions only).
      scale_max: uint8 [B, K, H], largest `code_scale` of a channel over the full blocks.
      key_norm_max: float32 [B, K], upper bound of ‖key‖ over the row.
      channel_weight: float32 [B, K, H], positive; sharpens the score bound, valid for any values.
      channel_order: int32 [B, K, H], a permutation: its first half is coded in the low nibbles.
      value_center: float32 [B, K, H], c0 of the certificate; fixed by the first prefill.
      length: int32 [B], tokens held by each row.
      valid: bool [B], False once a row overflowed or was given NaN or inf: its outputs are NaN from then on.
      dtype: name of the keys' and values' dtype (static).
    """

    key: jax.Array
    value: jax.Array
    codes: jax.Array
    code_scale: jax.Array
    code_zero: jax.Array
    residual_ratio: jax.Array
    residual_norm: jax.Array
    value_size: jax.Array
    value_norm: jax.Array
    scale_max: jax.Array
    key_norm_max: jax.Array
    channel_weight: jax.Array
    channel_order: jax.Array
    value_center: jax.Array
    length: jax.Array
    valid: jax.Array
    dtype: str = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, K, S, H)."""
        B, K, S, H = self.key.shape
        return B, K, S, H

    @property
    def capacity(self) -> int:
        """S, the tokens that a row can hold."""
        return self.key.shape[2]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Certificate:
    """What is proven about each query head of one step; every field is [B, N].

    Attributes:
      certified: bool, the claim of the chosen measure holds: sampled and certified, or computed exactly.
      exact: bool, the head read every key; its error is that of float32 arithmetic.
      error_bound: float32, with probability ≥ 1 − δ the error is at most this: ‖ô − o‖ ("value", "output") or
        |D̂ − D| / D ("denominator"). 0 where exact, inf where not certified. It includes what float32 arithmetic may
        add, relative to the largest values, and so may exceed ε M by a little.
      level: int32, index of the level at which sampling stopped; −1 where exact.
      threshold: float32, ln τ of that level, relative to a reference score and size of the head's own; −inf where
        exact.
      keys_read: int32, pool keys whose value was read (all of them where exact); the window is not counted.
      candidates: int32, pool keys whose exact score was read.
      bytes_read: float32, bytes of cache and metadata that the head's share of the step reads (model, not measured).
      log_normalizer: float32, ln of the (estimated) softmax denominator, for merging partial results.
      value_scale_lower: float32, certified lower bound of M, M² = Σ a_i ‖v_i‖².
    """

    certified: jax.Array
    exact: jax.Array
    error_bound: jax.Array
    level: jax.Array
    threshold: jax.Array
    keys_read: jax.Array
    candidates: jax.Array
    bytes_read: jax.Array
    log_normalizer: jax.Array
    value_scale_lower: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Hint:
    """What a step tells the next step of the same layer; it affects speed, never validity.

    Attributes:
      level: float32 [B, N], the level that would have been sufficient; −1 where nothing is known.
      wait: int32 [B, N], steps for which the kv head is computed exactly, because sampling cost more than that
        (cost.py); equal for the heads of a group.
    """

    level: jax.Array
    wait: jax.Array


def init_hint(*, batch: int, heads: int) -> Hint:
    """The hint of the first step, which knows nothing: B rows, N query heads."""
    return Hint(level=jnp.full((batch, heads), -1, jnp.float32), wait=jnp.zeros((batch, heads), jnp.int32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class AttentionResult:
    """Result of `certjax.decode_attention`.

    Attributes:
      output: [B, 1, N, H], the query's dtype.
      certificate: Certificate, every field [B, N].
      hint: Hint, pass it to the next step of the same layer.
    """

    output: jax.Array
    certificate: Certificate
    hint: Hint
