"""The controller's cost model of a device: four linear coefficients and, if measured, the mixed-batch cost."""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from itertools import pairwise
from numbers import Integral
from typing import Any, Protocol

from vllm_eb.settings import GivenValueError, name_hint


class CostGridError(GivenValueError):
    """A grid that is not ordered, has holes, or has times that are not positive; the message names the field."""


class StepCosts(Protocol):
    """Step times in seconds. ``context_tokens``: mean KV length of a decoding sequence.

    Step times for the scheduler: measured on a grid, or the linear model without measurements.

    ``ebbench calibrate`` measures the grid on a real engine; for an emulated device it is evaluated from the cost
    model. Policies that compare the costs of exclusive and mixed prefills need it; the published policies do not.
    """

    def prefill_s(self, tokens: float) -> float:
        """Time (s) of a step with ``tokens`` prompt tokens and no decodes."""
        ...

    def decode_s(self, seqs: float, context_tokens: float) -> float:
        """Time (s) of a step with one token for each of ``seqs`` sequences."""
        ...

    def decode_at(self, context_tokens: float) -> Callable[[float], float]:
        """``decode_s`` at this context, as a function of the sequences: cheaper where it is asked several times."""
        ...

    def mixed_s(self, tokens: float, seqs: float, context_tokens: float) -> float:
        """Time (s) of a step with ``tokens`` prompt tokens and ``seqs`` decoding sequences."""
        ...


@dataclass(frozen=True)
class CostGrid:
    """Measured step times in seconds, interpolated linearly and extrapolated linearly beyond the grid.

    Axes are increasing: ``tokens`` (prompt tokens of a step), ``seqs`` (decoding sequences), ``contexts`` (mean KV
    tokens per sequence). ``prefill[i]`` is at tokens i; ``decode[j][c]`` at seqs j, contexts c; ``mixed[i][j][c]``.
    """

    tokens: tuple[int, ...]
    seqs: tuple[int, ...]
    contexts: tuple[int, ...]
    prefill: tuple[float, ...]
    decode: tuple[tuple[float, ...], ...]
    mixed: tuple[tuple[tuple[float, ...], ...], ...]

    def __post_init__(self) -> None:
        for name in ("tokens", "seqs", "contexts"):
            axis = getattr(self, name)
            numbers = all(_counts(value) for value in axis)
            if len(axis) < 2 or not numbers or any(b <= a for a, b in pairwise(axis)):
                raise CostGridError(f"grid.{name} must hold at least two increasing numbers, whole and positive")
        shape = (len(self.tokens), len(self.seqs), len(self.contexts))
        _check("grid.prefill", self.prefill, shape[:1])
        _check("grid.decode", self.decode, shape[1:])
        _check("grid.mixed", self.mixed, shape)

    def prefill_s(self, tokens: float) -> float:
        """See StepCosts."""
        index, share = _locate(self.tokens, tokens)
        return _between(self.prefill[index], self.prefill[index + 1], share)

    def decode_s(self, seqs: float, context_tokens: float) -> float:
        """See StepCosts."""
        return self.decode_at(context_tokens)(seqs)

    def decode_at(self, context_tokens: float) -> Callable[[float], float]:
        """See StepCosts."""
        axis, table, last = self.seqs, self.decode, len(self.seqs) - 2
        left, v = _locate(self.contexts, context_tokens)
        right = left + 1

        def decode_s(seqs: float) -> float:
            # A scheduler asks several times per step: no further function is called.
            i = bisect_right(axis, seqs) - 1
            if i < 0:
                i = 0
            elif i > last:
                i = last
            first, second, start = table[i], table[i + 1], axis[i]
            low, high = first[left], second[left]
            low, high = low + (first[right] - low) * v, high + (second[right] - high) * v
            u = (seqs - start) / (axis[i + 1] - start)
            return low + (high - low) * u if u > 0.0 else low

        return decode_s

    def mixed_s(self, tokens: float, seqs: float, context_tokens: float) -> float:
        """See StepCosts."""
        (index, share), (i, u), (j, v) = (
            _locate(self.tokens, tokens),
            _locate(self.seqs, seqs),
            _locate(self.contexts, context_tokens),
        )
        ends = []
        for plane in self.mixed[index : index + 2]:
            first, second = plane[i], plane[i + 1]
            low, high = first[j] + (first[j + 1] - first[j]) * v, second[j] + (second[j + 1] - second[j]) * v
            ends.append(low + (high - low) * u)
        return ends[0] + (ends[1] - ends[0]) * share


@dataclass(frozen=True)
class LinearCosts:
    """The linear model (Zhang et al. 2026, 3.1).

    Without measured mixed costs a mixed step costs the sum of its parts.
    """

    alpha_p: float
    beta_p: float
    alpha_d: float
    beta_d: float
    alpha_mb: float
    mixed_a: float | None = None
    mixed_b: float = 0.0
    mixed_c: float = 0.0

    def prefill_s(self, tokens: float) -> float:
        """See StepCosts."""
        return self.alpha_p + self.beta_p * tokens

    def decode_s(self, seqs: float, context_tokens: float) -> float:
        """See StepCosts; the linear model ignores contexts."""
        return self.alpha_d + self.beta_d * seqs

    def decode_at(self, context_tokens: float) -> Callable[[float], float]:
        """See StepCosts; the linear model ignores contexts."""
        return lambda seqs: self.alpha_d + self.beta_d * seqs

    def mixed_s(self, tokens: float, seqs: float, context_tokens: float) -> float:
        """See StepCosts."""
        if self.mixed_a is None:
            return max(self.alpha_p, self.alpha_d) + self.beta_p * tokens + self.beta_d * seqs
        r = seqs / (tokens + seqs)
        return self.alpha_mb + (self.mixed_a + (self.mixed_b + self.mixed_c * r) * r) * (tokens + seqs)


def _locate(axis: Sequence[int], value: float) -> tuple[int, float]:
    """Grid cell of ``value`` and its position in it: in [0, 1] inside, above 1 beyond the end, 0 before the start.

    A scheduler calls this a dozen times per step: no further function is called.
    """
    index, last = bisect_right(axis, value) - 1, len(axis) - 2
    if index < 0:
        index = 0
    elif index > last:
        index = last
    low = axis[index]
    share = (value - low) / (axis[index + 1] - low)
    return index, share if share > 0.0 else 0.0


def _between(low: float, high: float, share: float) -> float:
    return low + (high - low) * share


def _counts(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) > 0


def _check(name: str, values: object, shape: tuple[int, ...]) -> None:
    if not shape:
        if not isinstance(values, int | float) or not math.isfinite(values) or values <= 0:
            raise CostGridError(f"{name} holds {values!r}, not a positive time in seconds")
        return
    if not isinstance(values, tuple) or len(values) != shape[0]:
        raise CostGridError(f"{name} does not have the {shape[0]} entries its axis asks for")
    for value in values:
        _check(name, value, shape[1:])


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
    measured step times for policies that compare costs per step; ``undrafted``: of a server that drafts tokens, those
    of steps without drafts; ``drafts``: tokens drafted per decode where grid and coefficients were measured with
    them, else 0. Raises CalibrationError for a cost that is negative or not finite.
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
    undrafted: CostGrid | None = None
    drafts: int = 0

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
        if not isinstance(self.drafts, int) or isinstance(self.drafts, bool) or self.drafts < 0:
            raise CalibrationError(f"drafts must be a whole number of tokens, not {self.drafts!r}")


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
    for name in ("grid", "undrafted"):
        if known.get(name) is not None:
            known[name] = _grid(known[name], f"{name}.")
    if not isinstance(known.get("source", ""), str):
        raise CalibrationError("source must be text")
    return Calibration(**known)


def _grid(raw: object, prefix: str) -> CostGrid:
    fields = _known_fields(raw, CostGrid, prefix)
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


_MOST_S = 1e6
"""A cost of a step or token beyond it is in another unit."""


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CalibrationError(f"{name} must be a finite number, not {value!r}")
    return float(value)


def _cost(name: str, value: object) -> float:
    number = _number(name, value)
    if number < 0.0:
        raise CalibrationError(f"{name} must not be negative, but is {value}")
    if number > _MOST_S:
        raise CalibrationError(f"{name} must be at most {_MOST_S:g} s, but is {value}")
    return number
