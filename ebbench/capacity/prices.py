"""Prices per GPU-hour, from ``NAME=PRICE`` on the command line or a TOML file. No price is built in: they change."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from ebbench.config.strict_toml import load_toml
from ebbench.errors import InputFileError, UsageError


class PriceFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of prices: ``gpu_hour`` by device. ``currency`` and ``as_of``, a date, are for its readers."""

    gpu_hour: dict[str, float]
    currency: str = ""
    as_of: str = ""


def parse_prices(texts: Iterable[str]) -> dict[str, float]:
    """Prices by device name; later ones go before earlier ones.

    Raises UsageError for a price that is not a positive number, InputFileError for a file in another form.
    """
    prices: dict[str, float] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if equals:
            prices[name.strip()] = _positive(text, value)
        else:
            prices |= _read(Path(text))
    return prices


def check_prices(prices: Mapping[str, float], devices: Iterable[str]) -> None:
    """Raise UsageError where some devices have a price and others none: their costs would not compare."""
    lacking = [device for device in devices if device not in prices]
    if prices and lacking:
        raise UsageError(f"no price for {', '.join(lacking)}; give --price {lacking[0]}=..., or choose with --device")


def _read(path: Path) -> dict[str, float]:
    if not path.is_file():
        raise UsageError(f"--price {path}: neither NAME=PRICE, such as h200=3.5, nor a TOML file")
    found = load_toml(path, PriceFile)
    for name, value in found.gpu_hour.items():
        if not (math.isfinite(value) and value > 0):
            raise InputFileError(path, f"gpu_hour.{name} must be a positive price, not {value:g}")
    return dict(found.gpu_hour)


def _positive(text: str, value: str) -> float:
    try:
        price = float(value)
    except ValueError:
        price = math.nan
    if not (math.isfinite(price) and price > 0):
        raise UsageError(f"--price {text!r} needs a positive price per GPU-hour, such as h200=3.5")
    return price
