"""The title of the HTML page."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from ebbench.report.page_data import _title


@pytest.mark.parametrize(("device", "title"), [("unknown", "balanced on a server"), ("h200", "balanced on h200")])
def test_a_server_without_a_known_device_is_called_a_server(device: str, title: str) -> None:
    assert _title(cast(Any, [SimpleNamespace(workload="balanced", device=device)])) == title
