"""Device profiles and model geometries as files: reading, listing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from ebbench.config.declare import MOST_SECONDS
from ebbench.devices.geometry import ModelGeometry
from ebbench.errors import InputFileError, UnknownNameError, check_known
from ebbench.foreign.documents import read_toml
from ebbench.spec.server import HostCosts

DATA = Path(__file__).parent / "data"
FORMAT = 1
MODEL_FILES = ("config.json", "params.json")
ASSUME_PREFIX = "assume-decoder:"
T = TypeVar("T")


@dataclass(frozen=True)
class Link:
    """A link between two GPUs of one server: bytes per second one way, seconds of one small collective, description.

    If kernel tables hold measured collectives over the link, they are used instead of both numbers.
    """

    bytes_per_s: float
    latency_s: float = 10e-6
    note: str = "not described"


@dataclass(frozen=True)
class DeviceProfile:
    """One GPU: facts in SI units, its names in calibrations, kernel tables and fitted constants.

    ``links``: kinds of link between the GPUs of one server, the default first. ``gemm_factor``: time of a step's matrix
    products relative to the tables. ``context_bytes``: memory of the CUDA context, of libraries and workspaces (0.13 to
    0.30 GiB in logs of vLLM). ``max_num_seqs``, ``max_num_batched_tokens``: of a server on it, 0: what vLLM chooses
    (:func:`ebbench.devices.capacity.batch_limits`). ``short_name``: its name in tables and pictures.
    ``collectives_from``: the device whose measured collectives over the link of the same name stand for its own.
    ``mixed_note``: what stands for the attention of mixed batches where it was not measured; ``mixed_fitted``: whether
    that was fitted on this device;
    ``front_end``: class of machine (:mod:`ebbench.simulation.front_end`) whose front end its servers have; "": unknown.
    ``mxfp4_experts``: the type of the kernel tables that servers use for experts in MXFP4, where it is not w4a16_mxfp4.
    ``fp8_kv_as_16_bits``: decodes over a KV cache in FP8 are no faster than in 16 bits, as servers show.
    ``mixed_leaning``: which batches it makes look better than they may be, and by how much where that is known.
    """

    name: str
    gpu: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    bf16_flops_per_s: float
    provenance: str
    margin_s_per_token: float = 1e-4
    calibration_names: tuple[str, ...] = ()
    measured: Mapping[str, str] = field(default_factory=dict)  # model -> calibration file in the profile's directory
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    context_bytes: int = 290_000_000
    mixed_from: str = ""
    collectives_from: str = ""
    mixed_note: str = "the sum of its parts"
    mixed_fitted: bool = False
    mixed_leaning: str = ""
    host: Mapping[str, HostCosts] = field(default_factory=dict)
    links: Mapping[str, Link] = field(default_factory=dict)
    gemm_factor: float = 1.0
    short_name: str = ""
    fp8_kv_as_16_bits: bool = False
    mxfp4_experts: str = ""
    front_end: str = ""


def list_devices() -> tuple[str, ...]:
    """Names of the bundled profiles."""
    return tuple(sorted(path.stem for path in (DATA / "profiles").glob("*.toml")))


def list_models() -> tuple[str, ...]:
    """Short names of the models with known geometry."""
    return tuple(sorted(_models()))


def find_profile(name: str) -> DeviceProfile:
    """A profile by name, or from a path ending in .toml. Raises UnknownNameError or InputFileError."""
    if name.endswith(".toml"):
        return read_profile(Path(name))
    check_known("device", name, list_devices())
    return read_profile(DATA / "profiles" / f"{name}.toml")


def as_decoder(model: str) -> str:
    """A model's path, to be read as an ordinary decoder whatever its config.json says that is not known here."""
    return model if model.startswith(ASSUME_PREFIX) else f"{ASSUME_PREFIX}{model}"


def find_model(name: str) -> ModelGeometry:
    """A model by short name, by Hugging Face name, or by the path of its config.json, its params.json or its folder.

    With :func:`as_decoder` a config.json is read though it has a type or keys that are not known.
    """
    given, assume = name.removeprefix(ASSUME_PREFIX), name.startswith(ASSUME_PREFIX)
    files = [Path(given) / file for file in MODEL_FILES] if Path(given).is_dir() else [Path(given)]
    if len(files) > 1 or given.endswith(".json"):
        from ebbench.devices.model_config import read_config  # 120 families: not loaded for a bundled model

        return read_config(next((file for file in files if file.is_file()), files[0]), assume_decoder=assume)
    models = _models()
    for model in models.values():
        if given.lower() in (model.name, model.hf_id.lower()):
            return model
    raise UnknownNameError("model", given, [*models, "PATH/config.json"])


def bundled_model(model: ModelGeometry) -> ModelGeometry | None:
    """The bundled model of the same short or Hugging Face name; None if there is none."""
    names = {model.name.lower(), model.hf_id.lower()}
    if model.name in _models():
        return _models()[model.name]
    return next(
        (candidate for candidate in _models().values() if names & {candidate.name, candidate.hf_id.lower()}), None
    )


def read_profile(path: Path) -> DeviceProfile:
    """Read and check a device profile. Raises InputFileError that names the field."""
    raw = read_toml(path)
    if raw.pop("format", None) != FORMAT:
        raise InputFileError(path, f"format must be {FORMAT}; is this a device profile?")
    hosts, links = raw.pop("host", {}), raw.pop("links", {})
    _check_fields(path, "", raw, DeviceProfile)
    if not isinstance(hosts, dict):
        raise InputFileError(path, "host must be a table of models")
    if not isinstance(links, dict):
        raise InputFileError(path, "links must be a table of links")
    host = {model: _named_table(path, "host", model, values, HostCosts) for model, values in hosts.items()}
    raw["measured"] = _measured(path, raw.get("measured", {}))
    for model, costs in host.items():
        if costs.request_s and not raw["measured"]:
            raise InputFileError(path, f"field host.{model}.request_s belongs to measured step times; none are named")
    names = raw.pop("calibration_names", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputFileError(path, f"field calibration_names must be a list of names, not {names!r}")
    for field_name in ("mixed_from", "collectives_from"):
        lender = raw.get(field_name)
        if lender and lender not in list_devices():
            raise InputFileError(path, f"field {field_name}: {UnknownNameError('device', lender, list_devices())}")
    return DeviceProfile(
        **raw,
        calibration_names=tuple(names),
        host=host,
        links={name: _named_table(path, "links", name, values, Link) for name, values in links.items()},
    )


def _named_table(path: Path, table: str, name: str, values: object, cls: type[T]) -> T:
    """One named table of ``table``, as ``cls``."""
    if not isinstance(values, dict):
        raise InputFileError(path, f"{table}.{name} must be a table")
    _check_fields(path, f"{table}.{name}.", values, cls, may_be_zero=cls is HostCosts)
    return cls(**values)


def _measured(path: Path, raw: object) -> dict[str, str]:
    if not isinstance(raw, dict) or not all(isinstance(file, str) for file in raw.values()):
        raise InputFileError(path, "field measured must be a table of models and calibration files")
    return {model: str(path.parent / file) for model, file in raw.items()}


def _check_fields(path: Path, prefix: str, raw: Mapping[str, Any], cls: type, *, may_be_zero: bool = False) -> None:
    """Raise InputFileError for unknown keys (keys contain units), missing fields, and impossible numbers."""
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
    least, most = _bounds(name)
    if value and not least <= value <= most:
        raise InputFileError(path, f"field {name} must be at least {least:g} and at most {most:g}, not {value!r}")


def _bounds(name: str) -> tuple[float, float]:
    """Least and largest number of a field by its unit; beyond them a step outlasts the nanoseconds of a simulation."""
    if name.endswith("_per_s"):
        return 1e6, 1e18
    return 0.0, MOST_SECONDS if name.endswith("_s") else 1e18 if name.endswith("_bytes") else 1e6


@cache
def _models() -> Mapping[str, ModelGeometry]:
    raw = read_toml(DATA / "models.toml")
    return {name: ModelGeometry(name=name, **values) for name, values in raw.items()}


def measured_name(model: str) -> str:
    """The name under which a profile has a model's measured step times: a path is its folder, wherever it is seen from.

    ``models/a``, ``models/a/config.json`` and the absolute path of either are one model.
    """
    path = Path(model).expanduser()
    if not path.exists():
        return model
    path = path.resolve()
    return str(path.parent if path.name == "config.json" else path)


# Which model and device a name stands for: own files may carry the name of a bundled one, or of each other.

DIGITS = 8
_WORDS = frozenset(
    {"name", "provenance", "source", "note", "mixed_note", "mixed_leaning", "doubt", "short_name", "gpu"}
)
"""Fields of a profile that no figure depends on."""


def device_identity(
    profile: DeviceProfile, model: ModelGeometry, *, cost: str, host: HostCosts | None
) -> tuple[tuple[str, str], ...]:
    """Names and values for a manifest that tell own models and devices from others of their names; empty for bundled
    ones.

    ``model_shape`` and ``device_profile``: main numbers, and a digest of all that figures depend on. ``model``: in its
    own types, before ``--quantization`` and ``--kv-cache-dtype``, which a run records by themselves.
    """
    identity = []
    bundled = bundled_model(model)
    if bundled is None or _content(bundled) != _content(model):
        types = {*model.weight_dtypes, model.kv_dtype} - {"bfloat16"}
        content = asdict(_content(model))
        del content["mtp_layers"]  # only speculative decoding depends on it, which a run's settings name
        shown = [f"{model.layers} layers of {model.hidden:,}", f"{model.params / 1e9:.2f}B parameters", *sorted(types)]
        identity.append(("model_shape", f"{', '.join(shown)}; {_digest(content)}"))
    if own := _profile(profile, cost, host):
        identity.append(("device_profile", own))
    return tuple(identity)


def identity_given(cost: object, kv_tokens: int) -> tuple[tuple[str, str], ...]:
    """As :func:`device_identity`, for a device that is given by its cost model and KV capacity."""
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
    return replace(
        _content(model), weight_dtype="bfloat16", attention_dtype="", expert_dtype="", router_dtype="bfloat16",
        kv_dtype="bfloat16",
    )  # fmt: skip


def _content(model: ModelGeometry) -> ModelGeometry:
    """The model without its names and what no figure depends on."""
    return replace(model, name="", hf_id="", note="", positions=0, mtp_layers=0)


def _profile(profile: DeviceProfile, cost: str, host: HostCosts | None) -> str:
    """The device by its numbers, if it is not a bundled one with the cost model it has by default; else empty."""
    parts = []
    if profile.name not in list_devices() or _numbers(profile) != _numbers(find_profile(profile.name)):
        rates = f"{profile.bandwidth_bytes_per_s / 1e12:.3g} TB/s, {profile.bf16_flops_per_s / 1e12:.4g} TFLOPS"
        parts.append(f"{rates}, {profile.memory_bytes / 1e9:.4g} GB; {_digest(_numbers(profile))}")
    if cost != "auto":
        parts.append(f"cost {cost}")
    if host is not None:
        parts.append(f"host {_digest(_without_words(asdict(host)))}")
    return ", ".join(parts)


def _numbers(profile: DeviceProfile) -> Any:
    """What figures depend on, with the contents of measured calibrations in place of their paths."""
    measured = {name: _file_digest(Path(path)) for name, path in profile.measured.items()}
    return _without_words(asdict(replace(profile, measured=measured)))


def _without_words(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_words(entry) for name, entry in value.items() if name not in _WORDS}
    return value


def _file_digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:DIGITS]
