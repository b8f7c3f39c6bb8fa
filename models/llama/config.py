"""What a Llama-family model is: sizes, rotary embedding, biases, norms, windows; read from config.json."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self

from certjax.models.llama.rope_config import (
    ROPE_LISTS,
    ROPE_PLACES,
    RopeConfig,
    is_positive_int,
    is_positive_number,
    read_rope,
)

# Fields of config.json that say nothing about inference, or that are read elsewhere (token ids: the tokenizer's).
_INERT = (
    "_attn_implementation_autoset",
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "is_llama_config",
    "model_type",
    "pad_token_id",
    "pretraining_tp",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "use_cache",
)
_INTEGERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_SIZES = (*_INTEGERS, "rms_norm_eps")
_FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")
_COMMON = (*_SIZES, "num_key_value_heads", "head_dim", "hidden_act", "tie_word_embeddings")
_QWEN_WINDOW = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
_FAMILIES: dict[str, tuple[str, ...]] = {
    "llama": ("attention_bias", "mlp_bias"),
    "mistral": ("sliding_window",),
    "qwen2": _QWEN_WINDOW,
    "qwen3": ("attention_bias", *_QWEN_WINDOW),
}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


@dataclasses.dataclass(frozen=True, slots=True)
class LlamaConfig:
    """A decoder of the Llama family. Every field changes the model; all are checked at construction.

    Attributes:
      vocab_size: V, tokens in the vocabulary.
      hidden_size: D, width of the residual stream.
      intermediate_size: F, width of the gated feed-forward layer.
      num_layers: L.
      num_heads: N query heads.
      num_kv_heads: K key-value heads; N is a multiple of K.
      head_dim: H, even; need not be D / N.
      max_positions: longest context, tokens.
      norm_eps: ε of every RMS norm.
      rope: rotary embedding.
      tied_embeddings: the output projection is the embedding table.
      qkv_bias: q, k and v projections have a bias.
      output_bias: the attention's output projection has a bias.
      mlp_bias: the three feed-forward projections have a bias.
      qk_norm: queries and keys of a head are RMS-normalised before rotation.
      windows: for each layer the number of newest tokens that it attends to, or None for all of them.

    Raises:
      ValueError: naming every field that is wrong.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope: RopeConfig
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]

    def __post_init__(self):
        problems = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and not is_positive_int(value):
                problems.append(f"{field.name} must be a positive integer, got {value!r}")
            if field.type is bool and not isinstance(value, bool):
                problems.append(f"{field.name} must be true or false, got {value!r}")
        if not is_positive_number(self.norm_eps):
            problems.append(f"norm_eps must be a positive finite number, got {self.norm_eps!r}")
        if not problems:
            if self.num_heads % self.num_kv_heads:
                problems.append(
                    f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})"
                )
            if self.rope.rope_type == "dynamic" and self.head_dim < 4:
                problems.append(f"a dynamic rotary embedding needs head_dim ≥ 4, got {self.head_dim}")
            if self.head_dim % 2:
                problems.append(f"head_dim must be even (rotary embedding turns pairs), got {self.head_dim}")
            if len(self.windows) != self.num_layers:
                problems.append(f"windows must have {self.num_layers} entries, one a layer, got {len(self.windows)}")
            if self.rope.context not in (None, self.max_positions):
                problems.append(f"rope.context is {self.rope.context}, expected max_positions = {self.max_positions}")
            for name in ROPE_LISTS:
                factors = getattr(self.rope, name)
                if factors is not None and len(factors) != self.head_dim // 2:
                    problems.append(
                        f"rope.{name} must have head_dim / 2 = {self.head_dim // 2} entries: {len(factors)}"
                    )
            if any(w is not None and not is_positive_int(w) for w in self.windows):
                problems.append(f"windows must be positive integers or None, got {self.windows}")
        if problems:
            raise ValueError(f"LlamaConfig: {'; '.join(problems)}")

    def with_context(self, positions: int) -> Self:
        """The same model for contexts of up to `positions` tokens, with the frequencies that those call for.

        Args:
          positions: prompt and generated tokens together. Beyond `max_positions` only where the rotary embedding says
            how ("dynamic"); shorter ones matter to "dynamic" and "longrope" alone.

        Raises:
          ValueError: not a positive integer, or more than the model can have.
        """
        if not is_positive_int(positions):
            raise ValueError(f"positions must be a positive integer, got {positions!r}")
        if positions > self.max_positions and self.rope.rope_type != "dynamic":
            raise ValueError(
                f"a context of {positions} tokens exceeds the model's {self.max_positions}, and its rotary embedding "
                f"({self.rope.rope_type}) does not say how to go beyond"
            )
        rope = self.rope if self.rope.context is None else dataclasses.replace(self.rope, context=positions)
        return dataclasses.replace(self, max_positions=positions, rope=rope)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads the content of a Hugging Face config.json of model_type llama, mistral, qwen2 or qwen3.

        `rope_scaling` and `rope_parameters` are both understood. A field that is neither used nor known to be without
        effect on inference is an error: what it means would be silently lost.

        Args:
          config: the parsed JSON object.

        Returns:
          The validated configuration.

        Raises:
          ValueError: unknown architecture; missing, unknown, unsupported or wrongly typed fields, all of them named.
        """
        family = _family(config)
        allowed = {*_COMMON, *ROPE_PLACES, *_FAMILIES[family], *_INERT}
        unknown = sorted(set(config) - allowed)
        missing = [name for name in _SIZES if config.get(name) is None]
        # Defaults of other families are numbers of one particular checkpoint: better to ask than to guess.
        if family != "llama" and config.get("num_key_value_heads") is None:
            missing.append("num_key_value_heads")
        windowed = family == "mistral" or (family != "llama" and config.get("use_sliding_window") is True)
        if windowed and "sliding_window" not in config:
            missing.append("sliding_window (null for none)")
        problems = []
        if unknown:
            problems.append(f"fields that certjax does not know for model_type {family!r}: {', '.join(unknown)}")
        if missing:
            problems.append(f"missing fields: {', '.join(missing)}")
        for name, accepted in {
            "hidden_act": ("silu", "swish", None),
            "rope_interleaved": (False, None),
            "partial_rotary_factor": (1, None),
        }.items():
            if config.get(name) not in accepted:
                problems.append(f"{name} = {config[name]!r} is not supported, expected {accepted[0]!r}")
        problems += [
            f"{name} must be {expected}, got {config[name]!r}"
            for names, fits, expected in _JSON_TYPES
            for name in names
            if config.get(name) is not None and not fits(config[name])
        ]
        if problems:
            raise ValueError(f"config.json: {'; '.join(problems)}")

        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim")
        if head_dim is None:
            if family != "qwen3" and config["hidden_size"] % heads:
                raise ValueError(
                    f"config.json: hidden_size ({config['hidden_size']}) is not a multiple of "
                    f"num_attention_heads ({heads}) and head_dim is not given"
                )
            head_dim = 128 if family == "qwen3" else config["hidden_size"] // heads
        attention_bias = config.get("attention_bias") or False
        kv_heads = config.get("num_key_value_heads")
        return cls(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=heads if kv_heads is None else kv_heads,
            head_dim=head_dim,
            max_positions=config["max_position_embeddings"],
            norm_eps=config["rms_norm_eps"],
            rope=read_rope(config),
            tied_embeddings=config.get("tie_word_embeddings") or False,
            qkv_bias=attention_bias or family == "qwen2",
            output_bias=attention_bias,
            mlp_bias=config.get("mlp_bias") or False,
            qk_norm=family == "qwen3",
            windows=_read_windows(config, family),
        )


# Fields of config.json, the test that they must pass, and what that test asks for; null counts as absent.
_JSON_TYPES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    ((*_INTEGERS, "num_key_value_heads", "head_dim"), is_positive_int, "a positive integer"),
    (("rms_norm_eps", "rope_theta"), is_positive_number, "a positive finite number"),
    (_FLAGS, lambda x: isinstance(x, bool), "true or false"),
    (("original_max_position_embeddings",), is_positive_int, "a positive integer"),
    (("rope_scaling", "rope_parameters"), lambda x: isinstance(x, Mapping), "an object"),
    (("max_window_layers",), lambda x: x == 0 or is_positive_int(x), "a non-negative integer"),
    (("layer_types",), lambda x: isinstance(x, (list, tuple)), "a list"),
)


def _family(config: Mapping[str, Any]) -> str:
    family = config.get("model_type")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise ValueError(
            f"config.json: model_type {family!r} is not supported; expected one of {', '.join(_FAMILIES)}"
            " (other architectures compute something else, so their weights cannot be used)"
        )
    architectures = config.get("architectures")
    if architectures not in (None, [], [_ARCHITECTURES[family]]):
        raise ValueError(
            f"config.json: architectures {architectures!r} with model_type {family!r} is not supported; "
            f"expected [{_ARCHITECTURES[family]!r}]"
        )
    return family


def _read_windows(config: Mapping[str, Any], family: str) -> tuple[int | None, ...]:
    layers, window = config["num_hidden_layers"], config.get("sliding_window")
    if family in ("qwen2", "qwen3") and not config.get("use_sliding_window", False):
        window = None
    if window is not None and not is_positive_int(window):
        raise ValueError(f"config.json: sliding_window must be a positive integer or null, got {window!r}")
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers") if family in ("qwen2", "qwen3") else 0
        first = 28 if first is None else first
        types = ["sliding_attention" if window is not None and i >= first else "full_attention" for i in range(layers)]
    if len(types) != layers:
        raise ValueError(f"config.json: layer_types must have {layers} entries, got {len(types)}")
    unknown = [kind for kind in types if kind not in ("full_attention", "sliding_attention")]
    if unknown:
        raise ValueError(
            f"config.json: layer_types has {unknown[0]!r}, expected only full_attention or sliding_attention"
        )
    if window is None and "sliding_attention" in types:
        raise ValueError("config.json: layer_types has sliding_attention, but no sliding_window is in use")
    return tuple(window if kind == "sliding_attention" else None for kind in types)
