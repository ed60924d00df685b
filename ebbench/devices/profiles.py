"""Device profiles and model geometries as files: reading, checking, listing."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from ebbench.devices.geometry import ModelGeometry, read_config
from ebbench.errors import InputFileError, UnknownNameError, UsageError

DATA = Path(__file__).parent / "data"
FORMAT = 1


@dataclass(frozen=True)
class HostCosts:
    """The free constants of a device and model (at most three), with where each value comes from.

    ``mixed_excess`` scales the part of a mixed attention call that exceeds its pure parts; 1 is as profiled.
    ``request_s`` is no free constant: `ebbench calibrate` measures it, beside a grid of step times.
    """

    step_s: float
    sequence_s: float
    mixed_excess: float = 1.0
    source: str = "default, not fitted"
    request_s: float = 0.0


@dataclass(frozen=True)
class DeviceProfile:
    """One GPU: facts in SI units, its names in calibrations, kernel tables and fitted constants."""

    name: str
    gpu: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    bf16_flops_per_s: float
    provenance: str
    margin_s_per_token: float = 1e-4
    calibration_names: tuple[str, ...] = ()
    measured: Mapping[str, str] = field(default_factory=dict)  # model -> calibration file beside the profile
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    sampler_bytes_per_logit: float = 45.0
    mixed_from: str = ""
    mixed_note: str = "taken as the sum of its parts"
    host: Mapping[str, HostCosts] = field(default_factory=dict)


def list_devices() -> tuple[str, ...]:
    """Names of the profiles that come with the program."""
    return tuple(sorted(path.stem for path in (DATA / "profiles").glob("*.toml")))


def list_models() -> tuple[str, ...]:
    """Short names of the models whose geometry is known."""
    return tuple(sorted(_models()))


def find_profile(name: str) -> DeviceProfile:
    """A profile by name, or from a path ending in .toml. Raises UnknownNameError or InputFileError."""
    if name.endswith(".toml"):
        return read_profile(Path(name))
    if name not in list_devices():
        raise UnknownNameError("device", name, list_devices())
    return read_profile(DATA / "profiles" / f"{name}.toml")


def find_model(name: str) -> ModelGeometry:
    """A model by short name, by Hugging Face name, or from a path to its config.json or to the folder it lies in."""
    if name.endswith(".json"):
        return read_config(Path(name))
    if Path(name).is_dir():
        return read_config(Path(name) / "config.json")
    if (Path(name) / "config.json").is_file():
        return read_config(Path(name) / "config.json")
    models = _models()
    for model in models.values():
        if name.lower() in (model.name, model.hf_id.lower()):
            return model
    raise UnknownNameError("model", name, [*models, "PATH/config.json"])


def read_profile(path: Path) -> DeviceProfile:
    """Read and check a device profile. Raises InputFileError with the field named."""
    raw = _toml(path)
    if raw.pop("format", None) != FORMAT:
        raise InputFileError(path, f"format must be {FORMAT}; is this a device profile?")
    hosts = raw.pop("host", {})
    _check_fields(path, "", raw, DeviceProfile)
    if not isinstance(hosts, dict):
        raise InputFileError(path, "host must be a table of models")
    host = {model: _host(path, model, values) for model, values in hosts.items()}
    raw["measured"] = _measured(path, raw.get("measured", {}))
    for model, costs in host.items():
        if costs.request_s and not raw["measured"]:
            raise InputFileError(path, f"field host.{model}.request_s belongs to measured step times; none are named")
    names = raw.pop("calibration_names", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputFileError(path, f"field calibration_names must be a list of names, not {names!r}")
    lender = raw.get("mixed_from")
    if lender and lender not in list_devices():
        raise InputFileError(path, f"field mixed_from: {UnknownNameError('device', lender, list_devices())}")
    return DeviceProfile(**raw, calibration_names=tuple(names), host=host)


def _host(path: Path, model: str, values: object) -> HostCosts:
    if not isinstance(values, dict):
        raise InputFileError(path, f"host.{model} must be a table")
    _check_fields(path, f"host.{model}.", values, HostCosts, may_be_zero=True)
    return HostCosts(**values)


def _measured(path: Path, raw: object) -> dict[str, str]:
    if not isinstance(raw, dict) or not all(isinstance(file, str) for file in raw.values()):
        raise InputFileError(path, "field measured must be a table of models and calibration files")
    return {model: str(path.parent / file) for model, file in raw.items()}


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputFileError(path, f"cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputFileError(path, f"is not TOML ({error})") from None


def _check_fields(path: Path, prefix: str, raw: Mapping[str, Any], cls: type, *, may_be_zero: bool = False) -> None:
    """Refuse unknown keys (a key carries its unit), holes, and numbers no device can have."""
    known = {f.name: f for f in fields(cls)}
    for key in raw:
        if key not in known:
            raise InputFileError(path, str(UnknownNameError("field", prefix + key, [prefix + k for k in known])))
    for name, spec in known.items():
        required = spec.default is MISSING and spec.default_factory is MISSING
        if required and name not in raw:
            raise InputFileError(path, f"field {prefix}{name} is missing")
        if name in raw and spec.type in ("int", "float"):
            _check_number(path, prefix + name, raw[name], may_be_zero)
            if spec.type == "int" and raw[name] != int(raw[name]):
                raise InputFileError(path, f"field {prefix}{name} must be a whole number, not {raw[name]!r}")
        if name in raw and spec.type == "str" and not isinstance(raw[name], str):
            raise InputFileError(path, f"field {prefix}{name} must be text, not {raw[name]!r}")


def _check_number(path: Path, name: str, value: object, may_be_zero: bool) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
        raise InputFileError(path, f"field {name} must be a number, not {value!r}")
    if value < 0 or (value == 0 and not may_be_zero):
        raise InputFileError(path, f"field {name} must be positive, not {value!r}")


@cache
def _models() -> Mapping[str, ModelGeometry]:
    raw = _toml(DATA / "models.toml")
    return {name: ModelGeometry(name=name, **values) for name, values in raw.items()}


def kv_capacity_tokens(
    profile: DeviceProfile,
    model: ModelGeometry,
    *,
    gpu_memory_utilization: float = 0.9,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
) -> int:
    """KV tokens that fit beside the weights and the activations vLLM reserves at start-up, in blocks of 16.

    The two limits of None are the profile's own (what a server on this GPU is usually started with).
    Raises UsageError with the numbers when the model does not fit.
    """
    if not 0 < gpu_memory_utilization <= 1:
        raise UsageError(f"gpu_memory_utilization must be above 0 and at most 1, not {gpu_memory_utilization}")
    budget = profile.memory_bytes * gpu_memory_utilization
    reserve = activation_reserve_bytes(profile, model, max_num_seqs, max_num_batched_tokens)
    free = budget - model.weight_bytes - reserve
    tokens = int(free // model.kv_bytes_per_token) // 16 * 16
    if tokens < 16:
        raise UsageError(
            f"{model.name} does not fit on {profile.name}: weights {model.weight_bytes / 1e9:.1f} GB and "
            f"activations {reserve / 1e9:.1f} GB against {budget / 1e9:.1f} GB "
            f"({gpu_memory_utilization:.0%} of {profile.memory_bytes / 1e9:.1f} GB); "
            "choose a smaller model or a larger device"
        )
    return tokens


_CONTEXT_BYTES = 600_000_000  # CUDA context, libraries and workspaces


def activation_reserve_bytes(
    profile: DeviceProfile,
    model: ModelGeometry,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
) -> int:
    """Bytes vLLM sets aside for activations, sampling and the CUDA context, estimated from the shapes.

    Its start-up run samples ``max_num_seqs`` sequences with top-k and top-p on. The native sampler sorts: logits,
    sorted copy, 64-bit indices, work space and probabilities are alive at once, 45 bytes a logit. This meets the KV
    capacities behind the EB paper's runs on RTX PRO 6000 and H200 within 2 %. A fused sampler takes about 11, which
    meets the measured RTX 4090 run.
    """
    seqs = profile.max_num_seqs if max_num_seqs is None else max_num_seqs
    tokens = profile.max_num_batched_tokens if max_num_batched_tokens is None else max_num_batched_tokens
    inner = model.experts_per_token * model.expert_intermediate if model.experts else model.intermediate
    per_token = model.dtype_bytes * (3 * inner + model.qkv_width + 4 * model.hidden)
    return int(_CONTEXT_BYTES + tokens * per_token + seqs * model.vocab * profile.sampler_bytes_per_logit)
