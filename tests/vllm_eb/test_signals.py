"""Signals at the end of forward passes: the values of PassClock, and their transport over a socket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from vllm_eb.signals import PassClock, Signal, SignalPublisher, endpoint_of_rank

zmq = pytest.importorskip("zmq")
WAIT_MS = 5000
STUCK = 40_000


class Kept:
    """Substitute for a publisher that keeps its signals."""

    def __init__(self) -> None:
        self.signals: list[Signal] = []

    def publish(self, signal: Signal) -> None:
        self.signals.append(signal)

    def close(self) -> None:
        pass


def clock(*times_ns: int) -> tuple[PassClock, Kept]:
    kept, given = Kept(), iter(times_ns)
    return PassClock(kept, 3, lambda: next(given)), kept  # type: ignore[arg-type]


def test_a_pass_lasts_from_its_start_to_its_end() -> None:
    passes, kept = clock(100, 350)
    output = object()
    passes.received = 7
    passes.scheduled(output)
    passes.ended(output, queued_tokens=0, kv_tokens=64, generates=False)
    assert kept.signals == [Signal(3, 0, 250, 7, 0, 64, continues=False, generates=False)]


def test_a_pass_scheduled_while_another_runs_starts_when_that_one_ends() -> None:
    passes, kept = clock(0, 10, 200, 260)
    first, second = object(), object()
    passes.scheduled(first)
    passes.scheduled(second)
    passes.ended(first, 0, 0, False)
    passes.ended(second, 0, 0, False)
    assert [(s.step_id, s.duration_ns, s.continues) for s in kept.signals] == [(0, 200, True), (1, 60, False)]


@pytest.mark.parametrize(("queued", "generates", "continues"), [(0, False, False), (5, False, True), (0, True, True)])
def test_a_pass_continues_while_tokens_are_queued_or_generated(queued: int, generates: bool, continues: bool) -> None:
    passes, kept = clock(0, 1)
    output = object()
    passes.scheduled(output)
    passes.ended(output, queued, 0, generates)
    assert kept.signals[0].continues is continues


def test_an_output_that_was_no_pass_is_ignored() -> None:
    passes, kept = clock(0, 5)
    output = object()
    passes.ended(object(), 0, 0, False)
    passes.scheduled(output)
    passes.ended(object(), 0, 0, False)
    assert kept.signals == []
    passes.ended(output, 0, 0, False)
    assert len(kept.signals) == 1


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
