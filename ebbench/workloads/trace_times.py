"""The unit of a trace's times: one rule for all formats; an ambiguous unit is refused, not guessed.

1. ISO 8601 text has no unit.
2. Numbers that are all calendar times of the years 2014 to 2049 in one unit (Unix time in s, ms, us or ns) have that
   unit, if the rate is then at least :data:`SLOWEST_EPOCH_RATE` requests/s.
3. Whole numbers are in the unit that the format defines for them (Mooncake: ms), if the mean rate is then plausible:
   at least ``PLAUSIBLE_RATE[0]`` and less than ``PLAUSIBLE_RATE[1]`` requests/s. That range spans a factor of 1000,
   so of the units s, ms, us and ns only one gives a plausible rate.
4. Numbers with fractions are seconds, if the rate is then at least ``PLAUSIBLE_RATE[0]``. Where the format defines the
   unit of whole numbers and they could be in that one too (less than :data:`FASTEST_DEFINED_RATE` requests/s), few
   fractions (:data:`FEW_FRACTIONS`) are taken as that unit, more are ambiguous.
5. All other cases need ``--time-unit``. If all times are equal, the unit has no effect and is not needed.

A format whose definition leaves no doubt (a column ``start_ns``, a load generator's result file) gives its unit itself.
"""

from __future__ import annotations

import datetime as dt
import math
import re
from array import array
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ebbench.errors import UsageError
from ebbench.workloads.options import TIME_UNITS

NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds", "iso": "ISO 8601"}

PLAUSIBLE_RATE = (0.1, 100.0)
"""Lowest and highest plausible mean requests/s. Public traces: Mooncake 3 to 7, Azure 2 to 70."""
SLOWEST_EPOCH_RATE = 1e-3
"""Requests/s below which large numbers are not read as Unix times."""
FASTEST_DEFINED_RATE = 1000.0
"""Requests/s below which a log can be in its format's own unit even if its times have fractions."""
FEW_FRACTIONS = 0.1
"""Share of times with fractions up to which the others were written as whole numbers on purpose."""
_LATEST = 1e19  # of ns since 1970 until 2286; also false for NaN
_EPOCH_S = (1.388e9, 2.525e9)  # the years 2014 to 2049


class Stamp(NamedTuple):
    """One recorded time: ISO text as seconds since 1970 (``iso``; ``zone``: it has an offset), else a number."""

    value: int | float
    iso: bool
    zone: bool = False


_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_SERVER_LOG = re.compile(r"(\d\d)/(\w{3})/(\d{4}):(\d\d:\d\d:\d\d) ([+-]\d\d)(\d\d)")
"""The clock of web servers' logs: ``10/Oct/2026:13:55:36 +0200``."""
_UTC = re.compile(r" (?:\+0000 )?(?:UTC|GMT)$")
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
_DAY_AND_MONTH = re.compile(r"\d{1,2}[/.]\d{1,2}[/.]\d{4}")


def read_stamp(value: Any) -> Stamp:
    """``parse_stamp`` for a cell of a log. Raises ValueError that says what is wrong and what to write instead."""
    try:
        return parse_stamp(value)
    except (TypeError, ValueError):
        text = str(value).strip()
    if not text:
        raise ValueError("is empty; expected a number or ISO 8601")
    if _DECIMAL_COMMA.fullmatch(text):
        remedy = f"; write decimals with a point, {text.replace(',', '.')}"
    elif _DAY_AND_MONTH.match(text):
        remedy = "; which number is the month cannot be told, write 2026-03-31 for the 31st of March"
    else:
        remedy = ", such as 12.5 or 2026-03-31T09:00:00.5Z"
    raise ValueError(f"{text[:40]!r} is neither a number nor ISO 8601{remedy}")


def parse_stamp(text: str | int | float | dt.datetime) -> Stamp:
    """Parse a time: a number, a calendar time, ISO 8601 with any number of decimals (also with " UTC" at its end), or
    the clock of web servers' logs. Raises ValueError."""
    if isinstance(text, dt.datetime):
        return _calendar(text)
    if not isinstance(text, str):
        number = text
    elif text[4:5] == "-":
        return _iso(text.strip())  # a calendar time, by far the most frequent text
    else:
        plain = text.strip()
        try:
            number = float(plain) if "." in plain else int(plain)
        except ValueError:
            try:
                number = float(plain)  # 1e3
            except ValueError:
                return _iso(plain)
    if not abs(number) <= _LATEST:
        raise ValueError(f"{str(text)[:40]!r} is no time")
    return Stamp(number, iso=False)


def _iso(text: str) -> Stamp:
    if text.endswith(("UTC", "GMT")):
        text = _UTC.sub("+00:00", text)
    elif (clock := _SERVER_LOG.fullmatch(text)) and clock[2] in _MONTHS:
        day, month, year, time, hours, minutes = clock.groups()
        text = f"{year}-{_MONTHS.index(month) + 1:02}-{day}T{time}{hours}:{minutes}"
    whole, _, rest = text.partition(".")
    if not rest:
        return _calendar(dt.datetime.fromisoformat(whole))
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    value, iso, zone = _calendar(dt.datetime.fromisoformat(whole + rest[len(digits) :]))
    return Stamp(value + float(f"0.{digits}") if digits else value, iso, zone)


def _calendar(moment: dt.datetime) -> Stamp:
    zone = moment.tzinfo is not None
    return Stamp((moment if zone else moment.replace(tzinfo=dt.UTC)).timestamp(), iso=True, zone=zone)


@dataclass(frozen=True)
class Stamps:
    """The times of a trace: ``first`` is the earliest, ``offsets`` of all times from it, in the file's unit.

    ``fractions``: the share of times that are no whole numbers.
    """

    first: int | float
    offsets: npt.NDArray[np.float64]
    iso: bool
    fractions: float = 0.0

    @property
    def whole(self) -> bool:
        """Whether all times are whole numbers."""
        return not self.fractions

    @property
    def span(self) -> float:
        """Time from the earliest to the latest, in the file's unit."""
        return float(self.offsets.max())

    def rate(self, unit: str) -> float:
        """Mean requests/s if read in ``unit``; infinite if all times are equal."""
        return (len(self.offsets) - 1) * TIME_UNITS[unit] / self.span if self.span else math.inf


@dataclass
class StampColumn:
    """Collects the times of one trace, 8 bytes per time, and whether they are of one kind.

    ``mixed_at``: index of the first time of another kind than the one before it, None if all are of one kind.
    """

    base: int | float = 0
    offsets: array[float] = field(default_factory=lambda: array("d"))
    fractions: int = 0
    mixed_at: int | None = None
    _iso: bool = False
    _zone: bool = False
    _mixed: str = ""

    def append(self, stamp: Stamp) -> None:
        """Add one time."""
        value, iso, zone = stamp
        if not self.offsets:
            self.base, self._iso, self._zone = value, iso, zone
        elif not self._mixed and (iso != self._iso or zone != self._zone):
            kinds = "are ISO 8601 and some are numbers" if iso != self._iso else "name their zone and some do not"
            self._mixed, self.mixed_at = f"some times {kinds}; write all of them one way", len(self.offsets)
        self.offsets.append(value - self.base)  # subtract first: ns need more than 53 bits
        if value != int(value):
            self.fractions += 1

    def stamps(self) -> Stamps:
        """The times from the earliest. Raises ValueError if their kinds are mixed."""
        if self._mixed:
            raise ValueError(self._mixed)
        offsets = np.array(self.offsets, np.float64)
        lowest = float(offsets.min())
        first = self.base + (lowest if self.fractions else int(lowest))
        return Stamps(first, offsets - lowest, self._iso, self.fractions / len(offsets))


@dataclass(frozen=True)
class TimeReading:
    """The unit of a trace's times (one of NAMES), and why."""

    unit: str
    reason: str


def read_time_unit(
    stamps: Stamps, asked: str | None = None, *, whole_numbers_are: str | None = None, numbers_are: str | None = None
) -> TimeReading:
    """The unit of a trace's times, by the rule of this module.

    ``asked``: the value of ``--time-unit``. ``whole_numbers_are``: the unit in which the format writes whole numbers,
    None if it has none; ``numbers_are``: the unit of all numbers where the format leaves no doubt. Raises UsageError if
    the unit is ambiguous.
    """
    if stamps.iso:
        if asked is not None:
            raise UsageError(f"the trace's times are ISO 8601 text, which has no unit; leave out --time-unit {asked}")
        return TimeReading("iso", "text in that form")
    if asked is not None:
        return TimeReading(asked, "--time-unit")
    if numbers_are is not None:
        return TimeReading(numbers_are, "by the format's definition")
    if not stamps.span:
        return TimeReading(whole_numbers_are or "s", "all requests have the same time")
    epoch = _epoch_unit(stamps)
    if epoch is not None:
        return TimeReading(epoch, "Unix times")
    slowest, fastest = PLAUSIBLE_RATE
    if not stamps.whole and whole_numbers_are is not None and stamps.rate(whole_numbers_are) < FASTEST_DEFINED_RATE:
        if stamps.fractions <= FEW_FRACTIONS and stamps.rate(whole_numbers_are) >= slowest:
            in_seconds = f"--time-unit s would make it {short_number(stamps.rate('s'))} per second"
            return TimeReading(whole_numbers_are, f"nearly all whole numbers, by the format's definition; {in_seconds}")
    elif not stamps.whole and stamps.rate("s") >= slowest:
        return TimeReading("s", "numbers with fractions")
    if stamps.whole and whole_numbers_are is not None and slowest <= stamps.rate(whole_numbers_are) < fastest:
        return TimeReading(whole_numbers_are, "whole numbers, by the format's definition")
    readings = "; ".join(
        f"{unit}: {short_number(stamps.rate(unit))} requests/s over {short_number(stamps.span / per_second)} s"
        for unit, per_second in TIME_UNITS.items()
    )
    kind = "whole numbers" if stamps.whole else "numbers with fractions"
    raise UsageError(f"the unit of the trace's times ({kind}) is ambiguous; give it with --time-unit ({readings})")


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


def mixed_epochs(stamps: Stamps) -> tuple[str, str, int] | None:
    """Two units (names) if all numbers are Unix times but not in one unit, and the index of the first in the second."""
    earliest, latest = _EPOCH_S
    units = np.full(len(stamps.offsets), -1)
    values = stamps.first + stamps.offsets
    for place, per_second in enumerate(TIME_UNITS.values()):
        units[(values >= earliest * per_second) & (values <= latest * per_second)] = place
    unlike = np.flatnonzero(units != units[0])
    if (units < 0).any() or not len(unlike):
        return None
    first, second = (NAMES[list(TIME_UNITS)[units[at]]] for at in (0, unlike[0]))
    return first, second, int(unlike[0])


def short_number(value: float) -> str:
    """Three significant digits, or all digits before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
