"""Random generators per subsystem: a change in one subsystem's draws does not change another's."""

from __future__ import annotations

import zlib

import numpy as np


def substream(seed: int, name: str) -> np.random.Generator:
    """The generator of subsystem ``name`` for ``seed`` (an integer >= 0); equal arguments give equal draws."""
    return np.random.default_rng(np.random.SeedSequence([seed, zlib.crc32(name.encode())]))
