"""The plugin's settings: one object under the key ``vllm_eb`` of vLLM's ``--additional-config``.

::

    --additional-config '{"vllm_eb": {"policy": "ebplus", "calibration": "/etc/gpu.json", "record": "/var/log/eb"}}'

``policy``: a policy string, or a mapping with ``kind`` and its settings. ``calibration``: the cost coefficients, inline
or as the path of a JSON file, required by the policies ``eb`` (without a fixed k or theta), ``ebplus`` and
``marginal``. ``record``: a directory for step and decision records; rank r above 0 uses its folder ``rank-r``; no
recording by default. ``signals``: a ZeroMQ endpoint (tcp://HOST:PORT) on which the end of every forward pass is
published, for ``ebbench gateway --signals``; rank r adds r to the port.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from vllm_eb.calibration import Calibration, CalibrationError, calibration_from_json
from vllm_eb.policy import PolicyError, PolicySpec, parse_policy, policy_from_mapping
from vllm_eb.settings import GivenValueError, name_hint
from vllm_eb.signals import endpoint_of_rank

KEY = "vllm_eb"
SCHEDULER = "vllm_eb.scheduler.EBScheduler"
_FIELDS = ("policy", "calibration", "record", "signals")

# Policies with a fixed rule do not use costs, but the controller needs the object.
_UNUSED = Calibration(alpha_p=0.0, beta_p=0.0, alpha_d=1.0, beta_d=0.0, source="not used by this policy")


class ConfigError(GivenValueError):
    """Invalid settings; the message says what to write instead."""


@dataclass(frozen=True)
class PluginConfig:
    """Validated settings."""

    policy: PolicySpec
    calibration: Calibration
    record: Path | None = None
    signals: str | None = None


def parse_config(additional_config: object) -> PluginConfig:
    """Parse the plugin's part of vLLM's ``additional_config``. Raises ConfigError."""
    settings = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
    if not isinstance(settings, Mapping):
        raise ConfigError(
            f'{SCHEDULER} needs its settings: add --additional-config \'{{"{KEY}": {{"policy": "ebplus", '
            '"calibration": "FILE.json"}}\''
        )
    for name in settings:
        if name not in _FIELDS:
            raise ConfigError(f"{KEY}: unknown setting {name!r}; {name_hint(str(name), _FIELDS)}")
    policy = _policy(settings.get("policy"))
    return PluginConfig(
        policy,
        _calibration(settings.get("calibration"), policy),
        _record(settings.get("record")),
        _signals(settings.get("signals")),
    )


def additional_config(
    policy: PolicySpec, calibration: Calibration | Path | None, record: Path | None = None, signals: str | None = None
) -> dict[str, object]:
    """The value of ``--additional-config`` for these settings, to be encoded as JSON; :func:`parse_config` parses
    it."""
    settings: dict[str, object] = {"policy": policy.name}
    if isinstance(calibration, Path):
        settings["calibration"] = str(calibration)
    elif calibration is not None:
        settings["calibration"] = asdict(calibration)
    if record is not None:
        settings["record"] = str(record)
    if signals is not None:
        settings["signals"] = signals
    return {KEY: settings}


def needs_calibration(policy: PolicySpec) -> bool:
    """Whether the policy uses costs."""
    return policy.needs_costs


def _policy(value: object) -> PolicySpec:
    try:
        if isinstance(value, str):
            return parse_policy(value)
        if isinstance(value, Mapping):
            return policy_from_mapping(value)
    except PolicyError as error:
        raise ConfigError(f"{KEY}.policy: {error}") from None
    raise ConfigError(f'{KEY}.policy must be a policy string such as "ebplus", not {value!r}')


def _calibration(value: object, policy: PolicySpec) -> Calibration:
    if value is None:
        if needs_calibration(policy):
            raise ConfigError(
                f"{KEY}: policy {policy.name!r} computes its threshold from the device's costs: set {KEY}.calibration "
                "to a JSON file or a mapping with alpha_p, beta_p, alpha_d, beta_d (seconds)"
            )
        return _UNUSED
    try:
        if isinstance(value, str):
            return calibration_from_json(Path(value).read_text(encoding="utf-8"))
        return calibration_from_json(json.dumps(value))
    except (CalibrationError, TypeError, ValueError) as error:
        raise ConfigError(f"{KEY}.calibration: {error}") from None
    except OSError as error:
        raise ConfigError(f"{KEY}.calibration: {value} cannot be read ({error.strerror})") from None


def _signals(value: object) -> str | None:
    if value is None:
        return None
    try:
        endpoint_of_rank(str(value), 0)
    except ValueError as error:
        raise ConfigError(f"{KEY}.signals: {error}") from None
    return str(value)


def _record(value: object) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise ConfigError(f"{KEY}.record must be the path of a directory, not {value!r}")
    return Path(value)


logger = logging.getLogger("vllm.vllm_eb")
