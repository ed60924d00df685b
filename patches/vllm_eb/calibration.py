"""The controller's cost model of a device: four linear coefficients and, if measured, the mixed-batch cost."""

from __future__ import annotations

import json
import math
import re
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from vllm_eb.costs import CostGrid, CostGridError, LinearCosts, StepCosts
from vllm_eb.errors import GivenValueError, name_hint

DEFAULT_MARGIN = 1e-4  # the authors' priority margin of EB+, s/token; device profiles may have their own


class CalibrationError(GivenValueError):
    """An invalid calibration; the message names the field."""


@dataclass(frozen=True)
class MixedCost:
    """Cost of one token in a mixed batch at decode share r: ``a + b*r + c*r**2``, s/token (appendix A.4).

    Raises CalibrationError unless the cost is finite and not negative everywhere on [0, 1].
    """

    a: float
    b: float
    c: float

    def __post_init__(self) -> None:
        for field in fields(self):
            _number(f"mixed.{field.name}", getattr(self, field.name))
        lowest = -self.b / (2.0 * self.c) if self.c else 0.0
        for r in (0.0, 1.0, min(max(lowest, 0.0), 1.0)):
            if self.at(r) < 0.0:
                raise CalibrationError(f"mixed a, b, c give a negative cost, {self.at(r):.3g} s/token at r = {r:.3g}")

    def at(self, r: float) -> float:
        """Cost in s/token at decode share ``r`` in [0, 1]."""
        return self.a + (self.b + self.c * r) * r


@dataclass(frozen=True)
class Calibration:
    """Linear cost model in seconds: prefill of x tokens ``alpha_p + beta_p*x``, decode of n sequences ``alpha_d +
    beta_d*n``.

    ``mixed``: None if not measured. ``alpha_mb``: None means ``alpha_p`` (the authors' default). ``margin``: EB+'s
    default priority margin delta on this device in s/token; a negative one favours exclusive batching. ``grid``:
    measured step times for policies that compare costs per step. Raises CalibrationError for a cost that is negative or
    not finite.
    """

    alpha_p: float
    beta_p: float
    alpha_d: float
    beta_d: float
    mixed: MixedCost | None = None
    alpha_mb: float | None = None
    margin: float = DEFAULT_MARGIN
    source: str = ""
    grid: CostGrid | None = None

    @property
    def costs(self) -> StepCosts:
        """Step times: the measured grid if there is one, else the linear model."""
        if self.grid is not None:
            return self.grid
        mixed = self.mixed
        return LinearCosts(
            self.alpha_p,
            self.beta_p,
            self.alpha_d,
            self.beta_d,
            self.alpha_p if self.alpha_mb is None else self.alpha_mb,
            *(() if mixed is None else (mixed.a, mixed.b, mixed.c)),
        )

    def __post_init__(self) -> None:
        for name in ("alpha_p", "beta_p", "alpha_d", "beta_d"):
            _cost(name, getattr(self, name))
        if self.alpha_d == 0.0:
            raise CalibrationError("alpha_d must be above 0: thresholds are ratios to a decode step's fixed cost")
        if self.alpha_mb is not None:
            _cost("alpha_mb", self.alpha_mb)
        _number("margin", self.margin)


def device_key(name: str) -> str:
    """A device name without vendor, edition and punctuation: ``NVIDIA RTX PRO 6000 ...`` -> ``rtxpro6000``."""
    bare = re.sub(r"nvidia|blackwell|server|workstation|edition", "", name.lower())
    return re.sub(r"[^a-z0-9]", "", bare)


def calibration_to_json(calibration: Calibration) -> str:
    """JSON text from which calibration_from_json builds an equal calibration."""
    return json.dumps(asdict(calibration), indent=2, allow_nan=False)


def calibration_from_json(text: str) -> Calibration:
    """Read the format of calibration_to_json. Raises CalibrationError naming the field."""
    try:
        return _from_json(json.loads(text))
    except CalibrationError:
        raise
    except RecursionError:
        raise CalibrationError("not valid: lists or objects are nested too deeply") from None
    except ValueError as error:  # also of a number of thousands of digits
        raise CalibrationError(f"not valid JSON: {error}") from None


def _from_json(raw: object) -> Calibration:
    known = _known_fields(raw, Calibration, "")
    mixed = known.pop("mixed", None)
    if mixed is not None:
        known["mixed"] = MixedCost(**_known_fields(mixed, MixedCost, "mixed."))
    if known.get("grid") is not None:
        known["grid"] = _grid(known["grid"])
    if not isinstance(known.get("source", ""), str):
        raise CalibrationError("source must be text")
    return Calibration(**known)


def _grid(raw: object) -> CostGrid:
    fields = _known_fields(raw, CostGrid, "grid.")
    try:
        return CostGrid(**{name: _tuples(value) for name, value in fields.items()})
    except CostGridError as error:
        raise CalibrationError(str(error)) from None


def _tuples(value: Any) -> Any:
    return tuple(_tuples(entry) for entry in value) if isinstance(value, list | tuple) else value


def _known_fields(raw: object, cls: type, prefix: str) -> dict[str, Any]:
    """The mapping itself, after a check that its keys are fields of ``cls`` and no required field is missing."""
    if not isinstance(raw, dict):
        raise CalibrationError(f"{prefix.rstrip('.') or 'a calibration'} must be a JSON object")
    names = {field.name for field in fields(cls)}
    for key in raw:
        if key not in names:
            raise CalibrationError(f"unknown field {prefix}{key}; {name_hint(key, names)}")
    for field in fields(cls):
        if field.default is MISSING and field.name not in raw:
            raise CalibrationError(f"field {prefix}{field.name} is missing")
    return dict(raw)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CalibrationError(f"{name} must be a finite number, not {value!r}")
    return float(value)


def _cost(name: str, value: object) -> float:
    number = _number(name, value)
    if number < 0.0:
        raise CalibrationError(f"{name} must not be negative, but is {value}")
    return number
