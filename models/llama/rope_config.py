"""Rotary embeddings: what a configuration may say about them, and how config.json says it."""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

# Where config.json speaks of them.
ROPE_PLACES = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "rope_interleaved",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)
# Rotary types: fields that a type must have, and fields that it may have.
_ROPE_TYPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor", "original_max_positions", "context"), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_positions"), ()),
    "yarn": (("factor", "original_max_positions"), ("beta_fast", "beta_slow", "attention_factor")),
    "longrope": (
        ("factor", "original_max_positions", "context", "short_factor", "long_factor"),
        ("attention_factor",),
    ),
}
ROPE_LISTS = ("short_factor", "long_factor")
# What a file may say beside type and theta; one field has another name here, one is not for a file to say.
_ROPE_FIELDS = {"original_max_position_embeddings"} | {
    name for required, optional in _ROPE_TYPES.values() for name in required + optional
} - {"original_max_positions", "context"}


@dataclasses.dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of one model. A field that the chosen type does not use must be left out.

    The frequencies of "dynamic" and "longrope" depend on how long a context is. Keys in a cache have been rotated, so
    here they depend on how long it may become, which is fixed before the first token: `LlamaConfig.with_context`.

    Attributes:
      theta: base of the frequencies.
      rope_type: "default", "linear", "dynamic", "llama3", "yarn" or "longrope".
      factor: by how much the context was stretched (all but default).
      original_max_positions: context length before stretching, tokens (dynamic, llama3, yarn, longrope).
      context: longest context that this embedding is for, tokens (dynamic, longrope).
      short_factor: longrope; divisor of every frequency [H / 2] where context ≤ original_max_positions.
      long_factor: likewise where it is longer.
      low_freq_factor: llama3; wavelengths above original_max_positions ÷ this are stretched in full.
      high_freq_factor: llama3; wavelengths below original_max_positions ÷ this are left alone.
      beta_fast: yarn; channels that turn more often than this over the original context are left alone (default 32).
      beta_slow: yarn; channels that turn less often than this are stretched in full (default 1).
      attention_factor: scale of cos and sin (yarn, default 0.1 ln factor + 1; longrope, default
        √(1 + ln factor / ln original_max_positions)).
      angles: "reference" rounds to float32 step by step, as the implementations do that models are published with;
        "exact" is accurate to 1e-6 at any position (they differ by up to 4e-3 radians at position 10⁵).

    Raises:
      ValueError: unknown type or angles, a field missing, not positive and finite, or not used by the type.
    """

    theta: float = 10000.0
    rope_type: str = "default"
    factor: float | None = None
    original_max_positions: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    context: int | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    angles: str = "reference"

    def __post_init__(self):
        if self.angles not in ("reference", "exact"):
            raise ValueError(f'angles must be "reference" or "exact": got {self.angles!r}')
        if self.rope_type not in _ROPE_TYPES:
            raise ValueError(f"rope_type {self.rope_type!r} is not supported; expected one of {', '.join(_ROPE_TYPES)}")
        required, optional = _ROPE_TYPES[self.rope_type]
        problems = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("rope_type", "angles"):
                continue
            if field.name != "theta" and value is not None and field.name not in required + optional:
                problems.append(f"{field.name} is not used by this type")
            elif value is None and field.name in required:
                problems.append(f"{field.name} is missing")
            elif field.name in ROPE_LISTS:
                if value is not None and not (isinstance(value, tuple) and all(map(is_positive_number, value))):
                    problems.append(f"{field.name} must be a tuple of positive finite numbers, got {value!r}")
            elif value is not None and not is_positive_number(value):
                problems.append(f"{field.name} must be a positive finite number, got {value!r}")
        if not problems and self.rope_type == "llama3" and self.high_freq_factor <= self.low_freq_factor:  # type: ignore[operator]
            problems.append("high_freq_factor must exceed low_freq_factor")
        if not problems and self.rope_type == "yarn" and self.theta <= 1:
            problems.append(f"theta must exceed 1, got {self.theta!r}")
        if not problems and self.rope_type == "longrope" and self.original_max_positions <= 1:  # type: ignore[operator]
            problems.append(f"original_max_positions must exceed 1, got {self.original_max_positions!r}")
        if problems:
            raise ValueError(f"rotary embedding of type {self.rope_type!r}: {'; '.join(problems)}")


def is_positive_number(value: Any) -> bool:
    """Whether it is a finite number above 0."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def is_positive_int(value: Any) -> bool:
    """Whether it is an integer above 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def read_rope(config: Mapping[str, Any]) -> RopeConfig:
    """The rotary embedding of a parsed config.json.

    `rope_theta` stands beside the scaling (older files) or inside `rope_parameters` (newer ones).

    Raises:
      ValueError: an unknown type or field, a field missing or said twice and differently, numbers that implementations
        read differently.
    """
    scaling, parameters = config.get("rope_scaling"), config.get("rope_parameters")
    if scaling and parameters and dict(scaling) != dict(parameters):
        raise ValueError("config.json: rope_scaling and rope_parameters contradict each other; keep one of them")
    rope = {name: value for name, value in (parameters or scaling or {}).items() if value is not None}
    kind, legacy = rope.pop("rope_type", None), rope.pop("type", None)
    if kind and legacy and kind != legacy:
        raise ValueError(
            f"config.json: the rotary embedding has rope_type {kind!r} and type {legacy!r}; keep one of them"
        )
    kind = kind or legacy or "default"
    kind = "longrope" if kind == "su" else kind  # its first name
    inner, outer = rope.pop("rope_theta", None), config.get("rope_theta")
    if inner is not None and outer is not None and inner != outer:
        raise ValueError(f"config.json: rope_theta is {outer} at top level and {inner} in the rotary parameters")
    theta = inner if inner is not None else outer
    if not isinstance(kind, str) or kind not in _ROPE_TYPES:
        raise ValueError(
            f"config.json: rotary type {kind!r} is not supported; expected one of {', '.join(_ROPE_TYPES)}"
        )
    if kind == "default":  # a file may keep the numbers of a scaling that it does not use
        rope = {name: value for name, value in rope.items() if (name, value) != ("factor", 1.0)}
    unknown = sorted(set(rope) - _ROPE_FIELDS)
    if unknown:
        raise ValueError(f"config.json: rotary fields that certjax does not know: {', '.join(unknown)}")
    longest = config["max_position_embeddings"]
    inner, outer = rope.pop("original_max_position_embeddings", None), config.get("original_max_position_embeddings")
    if inner is not None and outer is not None and inner != outer:
        raise ValueError(f"config.json: original_max_position_embeddings is {outer} at top level and {inner} inside")
    original = outer if inner is None else inner
    if original is not None:
        rope["original_max_positions"] = original
    elif kind in ("yarn", "dynamic"):
        rope["original_max_positions"] = longest
    if kind in ("dynamic", "longrope"):
        rope["context"] = longest
    if kind == "dynamic" and rope["original_max_positions"] != longest:
        raise ValueError(
            f"config.json: original_max_position_embeddings is {original} and max_position_embeddings {longest}: which "
            "of them a dynamic embedding grows from differs between implementations; make them equal"
        )
    if kind == "longrope" and is_positive_number(original):
        ratio = longest / original
        if rope.setdefault("factor", ratio) != ratio and "attention_factor" not in rope:
            raise ValueError(
                f"config.json: the longrope factor is {rope['factor']}, but max_position_embeddings ÷ "
                f"original_max_position_embeddings is {ratio}: which of them scales the attention differs between "
                "implementations; state attention_factor"
            )
    rope |= {name: tuple(rope[name]) for name in ROPE_LISTS if isinstance(rope.get(name), list)}
    return RopeConfig(theta=10000.0 if theta is None else theta, rope_type=kind, **rope)
