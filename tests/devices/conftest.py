"""Fixtures of tests about devices."""

from __future__ import annotations

import pytest

from ebbench.devices import library


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without the extra ``tables``."""
    monkeypatch.setattr(library, "installed", lambda: False)
