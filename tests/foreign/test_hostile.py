"""Hundreds of hostile files and options, each answered in one line within seconds; thousands: ``make hostile``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.foreign.hostile import wrong_cases

CASES = {"config": 70, "logs": 80, "toml": 60, "manifest": 40, "parquet": 50, "options": 20}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_hostile_files_and_options_are_answered_in_one_line(tmp_path: Path, kind: str) -> None:
    assert wrong_cases(kind, range(CASES[kind]), tmp_path) == []
