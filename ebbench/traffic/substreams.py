"""Random substreams named by subsystem: arrivals never change because contents drew one number more."""

from __future__ import annotations

import zlib

import numpy as np


def substream(seed: int, name: str) -> np.random.Generator:
    """Return the generator of subsystem ``name`` under ``seed`` (any integer >= 0); same arguments, same draws."""
    return np.random.default_rng(np.random.SeedSequence([seed, zlib.crc32(name.encode())]))
