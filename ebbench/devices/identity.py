"""Which model and device a name stands for: own files may carry the name of a bundled one, or of each other."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ebbench.devices.base import CostModel
from ebbench.devices.geometry import ModelGeometry
from ebbench.devices.profiles import DeviceProfile, bundled_model, find_profile, list_devices
from ebbench.devices.request import DeviceRequest

DIGITS = 8
_WORDS = frozenset(
    {"name", "provenance", "source", "note", "mixed_note", "mixed_leaning", "doubt", "short_name", "gpu"}
)
"""Fields of a profile that no figure depends on."""


def identity_of(profile: DeviceProfile, model: ModelGeometry, request: DeviceRequest) -> tuple[tuple[str, str], ...]:
    """Names and values for a manifest that tell own models and devices from others of their names; empty for bundled
    ones.

    ``model_shape`` and ``device_profile``: main numbers, and a digest of all that figures depend on. ``model``: in its
    own types, before ``--quantization`` and ``--kv-cache-dtype``, which a run records by themselves.
    """
    found = []
    bundled = bundled_model(model)
    if bundled is None or _content(bundled) != _content(model):
        found.append(("model_shape", _shape(model)))
    if own := _profile(profile, request):
        found.append(("device_profile", own))
    return tuple(found)


def identity_given(cost: CostModel, kv_tokens: int) -> tuple[tuple[str, str], ...]:
    """The same for a device that is given by its constants."""
    return (("device_profile", _digest([repr(cost), kv_tokens])),)


def has_bundled_shape(model: ModelGeometry) -> bool:
    """Whether the model is one of the bundled ones by name and by shape, in whatever types it is served."""
    bundled = bundled_model(model)
    return bundled is not None and _comparable(bundled) == _comparable(model)


def has_other_shape(model: ModelGeometry) -> bool:
    """Whether a bundled model of this name has another shape, so that what is published of it does not apply."""
    return bundled_model(model) is not None and not has_bundled_shape(model)


def _comparable(model: ModelGeometry) -> ModelGeometry:
    """The model without what a server may choose, or what no step time depends on."""
    return replace(_content(model), weight_dtype="bfloat16", attention_dtype="", expert_dtype="", kv_dtype="bfloat16")


def _content(model: ModelGeometry) -> ModelGeometry:
    """The model without its names and what no figure depends on."""
    return replace(model, name="", hf_id="", note="", positions=0, mtp_layers=0)


def _shape(model: ModelGeometry) -> str:
    types = {*model.weight_dtypes, model.kv_dtype} - {"bfloat16"}
    content = asdict(_content(model))
    del content["mtp_layers"]  # only speculative decoding depends on it, which a run's settings name
    shown = [f"{model.layers} layers of {model.hidden:,}", f"{model.params / 1e9:.2f}B parameters", *sorted(types)]
    return f"{', '.join(shown)}; {_digest(content)}"


def _profile(profile: DeviceProfile, request: DeviceRequest) -> str:
    """The device by its numbers, if it is not a bundled one with the cost model it has by default; else empty."""
    parts = []
    if not _is_bundled(profile):
        rates = f"{profile.bandwidth_bytes_per_s / 1e12:.3g} TB/s, {profile.bf16_flops_per_s / 1e12:.4g} TFLOPS"
        parts.append(f"{rates}, {profile.memory_bytes / 1e9:.4g} GB; {_digest(_numbers(profile))}")
    if request.cost != "auto":
        parts.append(f"cost {request.cost}")
    if request.host is not None:
        parts.append(f"host {_digest(_without_words(asdict(request.host)))}")
    return ", ".join(parts)


def _is_bundled(profile: DeviceProfile) -> bool:
    return profile.name in list_devices() and _numbers(profile) == _numbers(find_profile(profile.name))


def _numbers(profile: DeviceProfile) -> Any:
    """What figures depend on, with the contents of measured calibrations in place of their paths."""
    measured = {name: _file_digest(Path(path)) for name, path in profile.measured.items()}
    return _without_words(asdict(replace(profile, measured=measured)))


def _without_words(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_words(each) for name, each in value.items() if name not in _WORDS}
    return value


def _file_digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:DIGITS]
