"""Distributions of times in seconds: think time, tool calls, the patience of clients.

Written ``20`` (always 20 s) or ``FAMILY:mean=20,std=40,max=300``; in TOML as a table with the same keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from ebbench.config.setting_strings import named_settings, setting, settings_of
from ebbench.config.strict_toml import not_positive
from ebbench.errors import UsageError

Family = Literal["fixed", "exponential", "gamma", "lognormal", "uniform"]
FAMILIES: tuple[Family, ...] = ("fixed", "exponential", "gamma", "lognormal", "uniform")
_WITH_STD = ("gamma", "lognormal")


class DurationSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Times with mean ``mean`` (s); ``std`` (s) for gamma and lognormal; uniform is from 0 to twice the mean.

    Times above ``max`` (s) become ``max``, so the mean then lies below ``mean``.
    """

    family: Family = "fixed"
    mean: float
    std: float | None = None
    max: float | None = None

    def __post_init__(self) -> None:
        for name in ("mean", "std", "max"):
            if problem := not_positive(name, getattr(self, name)):
                raise ValueError(problem)
        if (self.std is not None) != (self.family in _WITH_STD):
            needs = "needs std" if self.family in _WITH_STD else "takes no std"
            raise ValueError(f"a {self.family} time {needs}")

    def draw(self, rng: np.random.Generator, n: int) -> npt.NDArray[np.float64]:
        """Draw ``n`` times in seconds; shape (n,)."""
        times = self._raw(rng, n)
        return times if self.max is None else np.minimum(times, self.max)

    def _raw(self, rng: np.random.Generator, n: int) -> npt.NDArray[np.float64]:
        if self.family == "exponential":
            return rng.exponential(self.mean, n)
        if self.family == "uniform":
            return rng.uniform(0.0, 2 * self.mean, n)
        if self.family == "fixed":
            return np.full(n, self.mean)
        assert self.std is not None  # checked in __post_init__
        if self.family == "gamma":
            shape = (self.mean / self.std) ** 2
            return rng.gamma(shape, self.mean / shape, n)
        variance = np.log1p((self.std / self.mean) ** 2)
        return rng.lognormal(np.log(self.mean) - variance / 2, np.sqrt(variance), n)

    @property
    def text(self) -> str:
        """A short description for the manifest."""
        more = [f"{key} {value:g} s" for key in ("std", "max") if (value := getattr(self, key)) is not None]
        return f"{self.family}({', '.join([f'mean {self.mean:g} s', *more])})"


@dataclass(frozen=True)
class _Settings:
    """The keys of a duration in an option."""

    mean: float = setting(help="mean time", unit="s", above=0, example=20)
    std: float | None = setting(None, "standard deviation, for gamma and lognormal", unit="s", above=0, example=40)
    max: float | None = setting(None, "longest time", unit="s", above=0, example=300)


def parse_duration(text: str, option: str) -> DurationSpec:
    """Parse the value of ``option``. Raises UsageError that says what it takes."""
    family, colon, rest = text.partition(":")
    try:
        if not colon:
            return DurationSpec(mean=float(text))
        if family not in FAMILIES:
            raise ValueError
        given: dict[str, Any] = named_settings(rest, settings_of(_Settings), f"{option} {family}")
        return DurationSpec(family=family, **given)
    except UsageError:
        raise
    except (ValueError, TypeError) as error:
        why = f": {error}" if str(error) and colon and family in FAMILIES else ""
        raise UsageError(
            f"{option} {text!r} is no time{why}; write seconds (20), or one of {', '.join(FAMILIES)} with its mean, as "
            "in exponential:mean=20 or lognormal:mean=20,std=40,max=300"
        ) from None
