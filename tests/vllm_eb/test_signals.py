"""Signals at the end of forward passes: their values, and their transport over a socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from vllm_eb import config, reports
from vllm_eb.config import PluginConfig
from vllm_eb.policy import parse_policy
from vllm_eb.reports import StepReports
from vllm_eb.signals import Signal, SignalPublisher, endpoint_of_rank

zmq = pytest.importorskip("zmq")
WAIT_MS = 5000
STUCK = 40_000


class Kept:
    """Substitute for a publisher that keeps its signals."""

    def __init__(self, endpoint: str, rank: int) -> None:
        self.signals: list[Signal] = []

    def publish(self, signal: Signal) -> None:
        self.signals.append(signal)

    def close(self) -> None:
        pass


class Passes:
    """Reports of a scheduler with 100 blocks of 16 tokens, four of them in use, and the signals that they publish."""

    def __init__(self) -> None:
        pool = SimpleNamespace(num_gpu_blocks=101, get_num_free_blocks=lambda: 96)
        manager = SimpleNamespace(block_pool=pool, coordinator=SimpleNamespace(single_type_managers=()))
        self.scheduler = SimpleNamespace(
            kv_cache_manager=manager, block_size=16, log_stats=False, running=[], waiting=[],
            vllm_config=SimpleNamespace(instance_id="x"),
        )  # fmt: skip
        settings = PluginConfig(parse_policy("v1"), config._UNUSED, signals="ipc://x")
        self.reports = StepReports(self.scheduler, None, settings, rank=3)

    @property
    def signals(self) -> list[Signal]:
        publisher: Any = self.reports._publisher
        return list(publisher.signals)

    def scheduled(self, output: object) -> None:
        self.reports.scheduled(output, 0, None, (), [])

    def ended(self, output: object) -> None:
        self.reports.ended(output, None, ())


@pytest.fixture
def passes_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Passes]:
    def made(*times_ns: int) -> Passes:
        given = iter(times_ns)
        monkeypatch.setattr(reports, "time", SimpleNamespace(monotonic_ns=lambda: next(given)))
        monkeypatch.setattr(reports, "SignalPublisher", Kept)
        return Passes()

    return made


def test_a_pass_lasts_from_its_start_to_its_end(passes_at: Callable[..., Passes]) -> None:
    passes, output = passes_at(100, 350), object()
    for _ in range(7):
        passes.reports.received()
    passes.scheduled(output)
    passes.ended(output)
    assert passes.signals == [Signal(3, 0, 250, 7, 0, 64, continues=False, generates=False)]


def test_a_pass_scheduled_while_another_runs_starts_when_that_one_ends(passes_at: Callable[..., Passes]) -> None:
    passes, first, second = passes_at(0, 10, 200, 260), object(), object()
    passes.scheduled(first)
    passes.scheduled(second)
    passes.ended(first)
    passes.ended(second)
    assert [(s.step_id, s.duration_ns, s.continues) for s in passes.signals] == [(0, 200, True), (1, 60, False)]


@pytest.mark.parametrize(("queued", "generates", "continues"), [(0, False, False), (5, False, True), (0, True, True)])
def test_a_pass_continues_while_tokens_are_queued_or_generated(
    passes_at: Callable[..., Passes], queued: int, generates: bool, continues: bool
) -> None:
    passes, output = passes_at(0, 1), object()
    passes.scheduler.waiting = [SimpleNamespace(num_tokens=queued, num_computed_tokens=0)]
    passes.scheduler.running = [object()] * generates
    passes.scheduled(output)
    passes.ended(output)
    assert passes.signals[0].queued_tokens == queued
    assert passes.signals[0].continues is continues


def test_an_output_that_was_no_pass_is_ignored(passes_at: Callable[..., Passes]) -> None:
    passes, output = passes_at(0, 5), object()
    passes.ended(object())
    passes.scheduled(output)
    passes.ended(object())
    assert passes.signals == []
    passes.ended(output)
    assert len(passes.signals) == 1


@pytest.fixture
def subscriber() -> Iterator[Any]:
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
    yield socket
    context.destroy(linger=0)


def meet(publisher: SignalPublisher, subscriber: Any) -> None:
    """Connect. A PUB, unlike an XPUB, does not report a subscription, so signals are sent until one arrives."""
    subscriber.connect(publisher.endpoint)
    subscriber.setsockopt(zmq.RCVTIMEO, 20)
    for _ in range(WAIT_MS // 20):
        publisher.publish(Signal(1, -1, 0, 0, 0, 0, False, False))
        if next_step(subscriber) is not None:
            break
    subscriber.setsockopt(zmq.RCVTIMEO, WAIT_MS)


def test_signals_arrive_in_order_over_a_socket(tmp_path: Path, subscriber: Any) -> None:
    endpoint = f"ipc://{tmp_path}/s"
    publisher = SignalPublisher(endpoint, rank=1)
    assert publisher.endpoint == f"{endpoint}.1"
    sent = [Signal(1, step, 1000 + step, step, 2, 3, True, False) for step in range(20)]
    meet(publisher, subscriber)
    for signal in sent:
        publisher.publish(signal)
    received: list[Any] = []
    while len(received) < len(sent):
        signal = msgspec.msgpack.decode(subscriber.recv(), type=Signal)
        if signal.step_id >= 0:
            received.append(signal)
    publisher.close()
    assert received == sent


def test_publishing_without_subscribers_or_to_a_stuck_one_never_waits(tmp_path: Path, subscriber: Any) -> None:
    publisher = SignalPublisher(f"ipc://{tmp_path}/s")
    for step in range(50):  # no subscriber is connected
        publisher.publish(Signal(0, step, 1, 1, 0, 0, False, False))
    subscriber.setsockopt(zmq.RCVHWM, 1)
    meet(publisher, subscriber)
    for step in range(100, STUCK):  # more than the queues hold; a publisher that waited would never end
        publisher.publish(Signal(0, step, 1, 1, 0, 0, False, False))
    subscriber.setsockopt(zmq.RCVTIMEO, 200)
    steps = [step for step in iter(lambda: next_step(subscriber), None) if step >= 0]
    publisher.close()
    # Queued signals arrive in order, each once; further ones were dropped, as were those before the subscription.
    assert steps == sorted(set(steps))
    assert 0 < len(steps) < STUCK - 100
    assert steps[0] == 100


def next_step(subscriber: Any) -> int | None:
    try:
        return msgspec.msgpack.decode(subscriber.recv(), type=Signal).step_id
    except zmq.Again:
        return None


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [("tcp://127.0.0.1:7000", 2, "tcp://127.0.0.1:7002"), ("ipc:///tmp/x", 0, "ipc:///tmp/x"),
     ("ipc:///tmp/x", 2, "ipc:///tmp/x.2")],
)  # fmt: skip
def test_each_rank_has_an_endpoint_of_its_own(endpoint: str, rank: int, expected: str) -> None:
    assert endpoint_of_rank(endpoint, rank) == expected


@pytest.mark.parametrize("endpoint", ["tcp://host", "http://host:1", "7000"])
def test_endpoints_of_another_form_are_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"tcp://"):
        endpoint_of_rank(endpoint, 0)
