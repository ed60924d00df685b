import socket
from pathlib import Path

import pytest

DATA = Path(__file__).resolve().parents[1] / "data"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test connects to the real hub or reads this machine's cache: the address is a local port that refuses."""
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)


@pytest.fixture
def data() -> Path:
    return DATA


@pytest.fixture
def logs() -> Path:
    """Small files of the log formats."""
    return DATA / "logs"
