"""Opens a model's config.json and refuses values of the wrong kind, before they get a meaning."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ebbench.errors import InputFileError
from ebbench.foreign.documents import read_object

_OBJECTS = ("text_config", "quantization_config", "rope_scaling", "rope_parameters", "vision_config", "audio_config")
_LISTS = ("layer_types", "mlp_only_layers", "moe_layers", "attn_type_list")
_TEXTS = ("model_type", "torch_dtype", "dtype", "_name_or_path")
_FLAGS = ("tie_word_embeddings", "use_sliding_window")
_NUMBER_NAMES = re.compile(
    r"(num|n|max|first)_\w+|\w+_(size|window|dim|layers|heads|experts|interval|step|tokens|theta|pattern|freq|factor)|factor"
)
"""Names of numbers; what has one of them and is a text of digits is refused, not left out."""
_DIGITS = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*|\s*[+-]?(nan|inf(inity)?)\s*", re.IGNORECASE)
_MOST = {
    **dict.fromkeys(("num_hidden_layers", "n_layers", "n_layer", "num_layers"), 10_000),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 1_000_000),
}
_MOST_OTHERWISE = 2**40
"""Numbers above these describe no model, and would be counted up to."""


def read_model_file(path: Path) -> dict[str, Any]:
    """The object of a config.json whose values have the kinds that its keys say. Raises InputFileError."""
    raw = read_object(path)
    for place, key, value in _values(raw, ""):
        if (problem := _problem(key, value)) and value is not None:
            raise InputFileError(path, f"{place} must be {problem}, not {_short(value)}")
    return raw


def _values(raw: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str, Any]]:
    for key, value in raw.items():
        yield f"{prefix}{key}", key, value
        if key in _OBJECTS and isinstance(value, dict):
            yield from _values(value, f"{prefix}{key}.")


def _problem(key: str, value: Any) -> str:
    """What a value should be instead; empty if it can be what it is."""
    if key in _OBJECTS:
        return "" if isinstance(value, dict) else "an object"
    if key in _LISTS:
        return (
            "" if isinstance(value, list) and len(value) <= _MOST["num_hidden_layers"] else "a list with a layer each"
        )
    if key in _TEXTS:
        return "" if isinstance(value, str) else "a text"
    if key in _FLAGS:
        return "" if isinstance(value, bool) else "true or false"
    if not _NUMBER_NAMES.fullmatch(key):
        return ""
    if isinstance(value, str):
        return "a number without quotes" if _DIGITS.fullmatch(value) else ""
    if isinstance(value, float) and not math.isfinite(value):
        return "finite"
    if isinstance(value, dict) and key in _MOST:
        return "a whole number"
    most = _MOST.get(key, _MOST_OTHERWISE)
    return f"at most {most:,}" if isinstance(value, int | float) and value > most else ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:50]}..."
