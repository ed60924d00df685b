"""Choice of the source of lengths, its reason, and its time limit."""

import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ebbench.errors import RunError, UnknownNameError, UsageError
from ebbench.workloads import build_plan, data_sets
from ebbench.workloads.data_sets import Cache, checked_name, why_unreachable
from ebbench.workloads.spec import Hub, load_workload

NUMINA = Hub(dataset="owner/name")


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], str]]:
    """A server that answers every request with one status."""
    servers = []

    def start(status: int) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def silent() -> Iterator[str]:
    """A port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_hub_that_refuses_connections_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    reason = why_unreachable(NUMINA, os.environ)
    assert reason is not None
    assert "cannot be reached" in reason
    assert os.environ["HF_ENDPOINT"] in reason


def test_a_hub_that_never_answers_is_given_up_at_the_deadline(silent: str) -> None:
    reason = why_unreachable(NUMINA, {"HF_ENDPOINT": silent}, deadline_s=0.2)
    assert reason in (f"no response from {silent} within 0.2 s", f"{silent} cannot be reached (timed out)")


def test_the_deadline_is_three_seconds_whatever_the_client_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait is in a thread, so that a resolver that hangs does not delay the decision."""
    waited = []
    monkeypatch.setattr(data_sets, "_ask", lambda *_: threading.Event().wait())
    monkeypatch.setattr(threading.Thread, "join", lambda _, timeout=None: waited.append(timeout))
    assert why_unreachable(NUMINA, {"HF_ENDPOINT": "http://127.0.0.1:9"}) == (
        "no response from http://127.0.0.1:9 within 3 s"
    )
    assert waited == [3.0]


@pytest.mark.parametrize(("status", "reachable"), [(200, True), (401, True), (404, False), (500, False), (503, False)])
def test_a_hub_is_reachable_if_it_answers_with_these_statuses(
    answering: Callable[[int], str], status: int, reachable: bool
) -> None:
    address = answering(status)
    reason = why_unreachable(NUMINA, {"HF_ENDPOINT": address})
    assert (reason is None) == reachable
    if not reachable:
        assert reason == f"{address} answered {status} for owner/name"


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"])
def test_offline_mode_sends_no_request_to_the_hub(name: str) -> None:
    assert why_unreachable(NUMINA, {name: "1", "HF_ENDPOINT": "http://127.0.0.1:9"}) == f"{name} is set"


def test_an_unusable_hub_address_makes_the_hub_unreachable() -> None:
    assert "127.0.0.1:nope" in (why_unreachable(NUMINA, {"HF_ENDPOINT": "http://127.0.0.1:nope"}) or "")


def test_auto_falls_back_on_the_profile_and_says_so() -> None:
    plan = build_plan("sharegpt", num_prompts=50, seed=3)
    assert plan.facts["source"] == "profile"
    assert "cannot be reached" in plan.facts["source_reason"]
    assert str(plan.warnings[0]).startswith("lengths come from the published statistics of sharegpt")
    assert plan.table.equals(build_plan("sharegpt", num_prompts=50, seed=3, source="profile").table)


def test_a_hub_asked_for_by_name_must_answer() -> None:
    with pytest.raises(RunError, match=r"--source hub: .* cannot be reached .*; use --source profile") as caught:
        build_plan("sharegpt", source="hub")
    assert caught.value.exit_code == 4


def test_auto_falls_back_when_reading_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> Iterator[None]:
        raise OSError("the cable\nwas cut")
        yield

    monkeypatch.setattr(data_sets, "why_unreachable", lambda _: None)
    monkeypatch.setattr(data_sets, "stream", broken)
    plan = build_plan("numinamath", num_prompts=5)
    assert plan.facts["source"] == "profile"
    assert plan.facts["source_reason"] == "AI-MO/NuminaMath-CoT cannot be read: OSError: the cable"


def test_auto_falls_back_when_the_data_set_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    from ebbench.workloads.files import FileRecord

    monkeypatch.setattr(data_sets, "why_unreachable", lambda _: None)
    monkeypatch.setattr(data_sets, "stream", lambda _: iter([FileRecord(None, 1, {"question": "x"})]))
    plan = build_plan("numinamath", num_prompts=5)
    assert plan.facts["source"] == "profile"
    assert "missing required field 'problem'" in plan.facts["source_reason"]


@pytest.mark.parametrize(
    ("workload", "arguments", "message"),
    [
        ("balanced", {"source": "hub"}, r"has no \[records\]"),
        ("balanced", {"source": "file:x"}, r"has no \[records\]"),
        ("sharegpt", {"source": "file:x", "output_len": 9}, "lengths cannot be set"),
        ("sharegpt", {"source": "profile", "tokenizer": "words"}, "--source profile has none, leave it out"),
        ("sharegpt", {"output_len": 9, "tokenizer": "words"}, "lengths set by options has none, leave it out"),
    ],
)
def test_a_source_that_does_not_apply_is_refused(workload: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_plan(workload, **arguments)


@pytest.mark.parametrize("source", ["hubb", "file:", "profil", ""])
def test_an_unknown_source_is_refused(source: str) -> None:
    with pytest.raises(UnknownNameError, match="unknown source"):
        build_plan("sharegpt", source=source)


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b/c", "a b", "x/..", "", "owner/name?x"])
def test_odd_data_set_names_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not the name of a data set"):
        Cache(tmp_path, "key", Hub(dataset=name))


def test_cache_takes_the_smallest_that_is_enough(tmp_path: Path) -> None:
    cache = Cache(tmp_path, "key", NUMINA)
    assert cache.find(1) is None
    ten, five = cache.keep([{"a": 1}], 10), cache.keep([{"a": 1}], 5)
    assert cache.find(4) == five
    assert cache.find(7) == ten
    assert cache.find(11) is None
    everything = cache.keep([{"a": 1}], None)
    assert cache.find(11) == everything
    assert cache.find(5) == five
    assert Cache(tmp_path, "other", NUMINA).find(1) is None
    assert not list(tmp_path.glob("*.part"))


def test_every_bundled_hub_has_a_proper_name() -> None:
    for name in ("sharegpt", "longbench", "numinamath", "wildchat"):
        data_set = load_workload(name).hub
        assert data_set is not None
        assert checked_name(data_set)
