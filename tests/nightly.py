"""Which values of a parametrized test run every time, and which in ``make nightly`` alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def some_nightly(values: Sequence[Any], every_time: int) -> list[Any]:
    """The first values as they are, and the others marked ``nightly``."""
    return [*values[:every_time], *(pytest.param(value, marks=pytest.mark.nightly) for value in values[every_time:])]
