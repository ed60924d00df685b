"""Hundreds of hostile files and options, each answered in one line within seconds; thousands: ``make hostile``."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.foreign.hostile import wrong_cases

CASES = {"config": 70, "logs": 80, "toml": 60, "manifest": 40, "parquet": 50, "options": 20}


@pytest.fixture(scope="module")
def apart() -> Iterator[Executor]:
    """A new process that forks once per case: from one of pytest that has imported vLLM, forks take twice the time."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        yield executor


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_hostile_files_and_options_are_answered_in_one_line(tmp_path: Path, kind: str, apart: Executor) -> None:
    assert apart.submit(wrong_cases, kind, range(CASES[kind]), tmp_path).result() == []
