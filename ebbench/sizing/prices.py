"""Prices per GPU-hour, from ``NAME=PRICE`` on the command line or a TOML file. ebbench contains no prices, since they
change."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import msgspec

from ebbench.config.declare import Setting, value_of
from ebbench.devices.profiles import list_devices
from ebbench.errors import InputFileError, UsageError
from ebbench.foreign.documents import load_toml
from vllm_eb.settings import name_hint

PRICE = Setting("price per GPU-hour", unit="per GPU-hour", above=0, example=3.5)


class PriceFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of prices: ``gpu_hour`` by device. ``currency`` and ``as_of`` (a date) are printed with the costs."""

    gpu_hour: dict[str, float]
    currency: str = ""
    as_of: str = ""


def parse_prices(texts: Iterable[str]) -> dict[str, float]:
    """Prices by device name; later ones override those of earlier files.

    Raises UsageError for a price that is not a positive number or is given twice, InputFileError for a file of another
    format.
    """
    prices: dict[str, float] = {}
    named: set[str] = set()
    for text in texts:
        name, value = _pair(text)
        if name in named:
            raise UsageError(f"--price: {name} is given twice; give it once")
        if name:
            prices[name] = value_of(name, value, PRICE, "--price")
            named.add(name)
        else:
            prices |= _read(Path(text))
    return prices


def check_prices(texts: Iterable[str], devices: Iterable[str]) -> dict[str, float]:
    """Prices of the searched ``devices``, from the options or files in ``texts``.

    A file may price further devices, if they exist. Raises UsageError for a price of any other device, and if only some
    of the searched devices have a price: their costs would not be comparable. Raises what :func:`parse_prices` raises.
    """
    given, searched = list(texts), list(devices)
    prices = parse_prices(given)
    named = {name for name, _ in map(_pair, given) if name}
    for name in prices:
        if name not in searched and (name in named or name not in list_devices()):
            raise UsageError(
                f"--price {name}=...: {name!r} is not among the devices searched; {name_hint(name, searched)}"
            )
    lacking = [device for device in searched if device not in prices]
    if prices and lacking:
        raise UsageError(f"no price for {', '.join(lacking)}; give --price {lacking[0]}=..., or choose with --device")
    return {name: price for name, price in prices.items() if name in searched}


def sources(texts: Iterable[str]) -> str:
    """Currencies and dates that the price files in ``texts`` state, such as "USD as of 2026-11-01"; "" if none does."""
    files = [load_toml(Path(text), PriceFile) for text in texts if not _pair(text)[0]]
    stated = [" ".join(filter(None, (prices.currency, prices.as_of and f"as of {prices.as_of}"))) for prices in files]
    return " and ".join(dict.fromkeys(filter(None, stated)))


def _pair(text: str) -> tuple[str, str]:
    """Name and value of ``NAME=PRICE``; an empty name for the path of a file."""
    name, equals, value = (part.strip() for part in text.partition("="))
    return (name, value) if equals and name and name.isprintable() else ("", "")


def _read(path: Path) -> dict[str, float]:
    if not path.is_file():
        raise UsageError(f"--price {str(path)!r}: neither NAME=PRICE, such as h200=3.5, nor a TOML file")
    prices = load_toml(path, PriceFile)
    for name, value in prices.gpu_hour.items():
        if not (math.isfinite(value) and value > 0):
            raise InputFileError(path, f"gpu_hour.{name} must be a positive price, not {value:g}")
    return dict(prices.gpu_hour)
