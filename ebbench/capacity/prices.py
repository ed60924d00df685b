"""Prices per GPU-hour, from ``NAME=PRICE`` on the command line or a TOML file. ebbench contains no prices, since they
change."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from ebbench.config.setting_strings import Setting, value_of
from ebbench.config.strict_toml import load_toml
from ebbench.errors import InputFileError, UsageError

PRICE = Setting("price per GPU-hour", unit="per GPU-hour", above=0, example=3.5)


class PriceFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of prices: ``gpu_hour`` by device. ``currency`` and ``as_of`` (a date) are only for its readers."""

    gpu_hour: dict[str, float]
    currency: str = ""
    as_of: str = ""


def parse_prices(texts: Iterable[str]) -> dict[str, float]:
    """Prices by device name; later ones override earlier ones.

    Raises UsageError for a price that is not a positive number, InputFileError for a file of another format.
    """
    prices: dict[str, float] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if equals and name and name.isprintable():
            prices[name] = value_of(name, value, PRICE, "--price")
        else:
            prices |= _read(Path(text))
    return prices


def check_prices(prices: Mapping[str, float], devices: Iterable[str]) -> None:
    """Raise UsageError if only some devices have a price: their costs would not be comparable."""
    lacking = [device for device in devices if device not in prices]
    if prices and lacking:
        raise UsageError(f"no price for {', '.join(lacking)}; give --price {lacking[0]}=..., or choose with --device")


def _read(path: Path) -> dict[str, float]:
    if not path.is_file():
        raise UsageError(f"--price {str(path)!r}: neither NAME=PRICE, such as h200=3.5, nor a TOML file")
    found = load_toml(path, PriceFile)
    for name, value in found.gpu_hour.items():
        if not (math.isfinite(value) and value > 0):
            raise InputFileError(path, f"gpu_hour.{name} must be a positive price, not {value:g}")
    return dict(found.gpu_hour)
