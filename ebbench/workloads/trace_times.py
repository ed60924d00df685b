"""The unit of a trace's times: one rule for all formats; an ambiguous unit is refused, not guessed.

1. ISO 8601 text has no unit.
2. Numbers that are all calendar times of the years 2014 to 2049 in one unit (Unix time in s, ms, us or ns) have that
   unit, if the rate is then at least :data:`SLOWEST_EPOCH_RATE` requests/s.
3. Whole numbers are in the unit that the format defines for them (Mooncake: ms), if the mean rate is then plausible:
   at least ``PLAUSIBLE_RATE[0]`` and less than ``PLAUSIBLE_RATE[1]`` requests/s. That range spans a factor of 1000,
   so of the units s, ms, us and ns only one gives a plausible rate.
4. Numbers with fractions are seconds, if the rate is then at least ``PLAUSIBLE_RATE[0]``.
5. All other cases need ``--time-unit``. If all times are equal, the unit has no effect and is not needed.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ebbench.errors import UsageError
from ebbench.workloads.options import TIME_UNITS

NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds", "iso": "ISO 8601"}

PLAUSIBLE_RATE = (0.1, 100.0)
"""Lowest and highest plausible mean requests/s. Public traces: Mooncake 3 to 7, Azure 2 to 70."""
SLOWEST_EPOCH_RATE = 1e-3
"""Requests/s below which large numbers are not read as Unix times."""
_EPOCH_S = (1.388e9, 2.525e9)  # the years 2014 to 2049


class Stamp(NamedTuple):
    """One recorded time: ISO text as seconds since 1970 (``iso``; ``zone``: it has an offset), else a number."""

    value: int | float
    iso: bool
    zone: bool = False


def parse_stamp(text: str | int | float) -> Stamp:
    """Parse a time: a number, or ISO 8601 with any number of decimals. Raises ValueError."""
    if not isinstance(text, str):
        number = text
    else:
        plain = text.strip()
        try:
            number = int(plain)
        except ValueError:
            try:
                number = float(plain)
            except ValueError:
                return _iso(plain)
    if not math.isfinite(number):
        raise ValueError(f"{text!r} is not finite")
    return Stamp(number, iso=False)


def _iso(text: str) -> Stamp:
    whole, _, rest = text.partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    moment = dt.datetime.fromisoformat(whole + rest[len(digits) :])
    zone = moment.tzinfo is not None
    if not zone:
        moment = moment.replace(tzinfo=dt.UTC)
    return Stamp(moment.timestamp() + (float(f"0.{digits}") if digits else 0.0), iso=True, zone=zone)


@dataclass(frozen=True)
class Stamps:
    """The times of a trace: ``first`` is the earliest, ``offsets`` of all times from it, in the file's unit."""

    first: int | float
    offsets: npt.NDArray[np.float64]
    iso: bool
    whole: bool

    @property
    def span(self) -> float:
        """Time from the earliest to the latest, in the file's unit."""
        return float(self.offsets.max())

    def rate(self, unit: str) -> float:
        """Mean requests/s if read in ``unit``; infinite if all times are equal."""
        return (len(self.offsets) - 1) * TIME_UNITS[unit] / self.span if self.span else math.inf


def collect_stamps(stamps: Sequence[Stamp]) -> Stamps:
    """Combine the times of one trace. Raises ValueError if their kinds are mixed."""
    if len({stamp.iso for stamp in stamps}) > 1:
        raise ValueError("some times are ISO 8601 and some are numbers; write all of them one way")
    if len({stamp.zone for stamp in stamps}) > 1:
        raise ValueError("some times name their zone and some do not; write all of them one way")
    values = [stamp.value for stamp in stamps]
    first = min(values)
    offsets = np.array([value - first for value in values], np.float64)  # subtract first: ns need more than 53 bits
    return Stamps(first, offsets, stamps[0].iso, all(float(value).is_integer() for value in values))


@dataclass(frozen=True)
class TimeReading:
    """The unit of a trace's times (one of NAMES), and why."""

    unit: str
    reason: str


def read_time_unit(stamps: Stamps, asked: str | None = None, *, whole_numbers_are: str | None = None) -> TimeReading:
    """The unit of a trace's times, by the rule of this module.

    ``asked``: the value of ``--time-unit``. ``whole_numbers_are``: the unit in which the format writes whole numbers,
    None if it has none. Raises UsageError if the unit is ambiguous.
    """
    if stamps.iso:
        if asked is not None:
            raise UsageError(f"the trace's times are ISO 8601 text, which has no unit; leave out --time-unit {asked}")
        return TimeReading("iso", "text in that form")
    if asked is not None:
        return TimeReading(asked, "--time-unit")
    if not stamps.span:
        return TimeReading(whole_numbers_are or "s", "all requests have the same time")
    epoch = _epoch_unit(stamps)
    if epoch is not None:
        return TimeReading(epoch, "Unix times")
    slowest, fastest = PLAUSIBLE_RATE
    if not stamps.whole and stamps.rate("s") >= slowest:
        return TimeReading("s", "numbers with fractions")
    if stamps.whole and whole_numbers_are is not None and slowest <= stamps.rate(whole_numbers_are) < fastest:
        return TimeReading(whole_numbers_are, "whole numbers, by the format's definition")
    raise UsageError(_ambiguous(stamps))


def seconds_since_first(stamps: Stamps, reading: TimeReading) -> npt.NDArray[np.float64]:
    """All times in seconds from the earliest."""
    return stamps.offsets if reading.unit == "iso" else stamps.offsets / TIME_UNITS[reading.unit]


def _epoch_unit(stamps: Stamps) -> str | None:
    """The unit in which all numbers are Unix times with a plausible rate; the ranges of the units do not overlap."""
    earliest, latest = _EPOCH_S
    for unit, per_second in TIME_UNITS.items():
        inside = earliest * per_second <= stamps.first and stamps.first + stamps.span <= latest * per_second
        if inside and stamps.rate(unit) >= SLOWEST_EPOCH_RATE:
            return unit
    return None


def short_number(value: float) -> str:
    """Three significant digits, or all digits before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ambiguous(stamps: Stamps) -> str:
    readings = "; ".join(
        f"{unit}: {short_number(stamps.rate(unit))} requests/s over {short_number(stamps.span / per_second)} s"
        for unit, per_second in TIME_UNITS.items()
    )
    kind = "whole numbers" if stamps.whole else "numbers with fractions"
    return f"the unit of the trace's times ({kind}) is ambiguous; give it with --time-unit ({readings})"
