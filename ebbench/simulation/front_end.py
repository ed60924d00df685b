"""What stands between the clients and the engine of one instance: vLLM's API server, and the way to it and back.

A request enters the engine when a process of the API server has handled it, its prompt is tokenized and its latency is
over; each output token leaves when that process has streamed it, after all earlier jobs. The engine does not wait for
any of it. Prompts are tokenized one by one in a thread beside the process's event loop, which leaves it its core (vLLM
0.11: ``AsyncMicrobatchTokenizer``, 0.32: ``BaseRenderer``). With one core per queue, the departure of a job depends
only on earlier jobs: ``departure = max(arrival, departure of the previous job) + service``. It is computed when the job
arrives and needs no event queue, provided that jobs arrive in order of time.

``token_ns``, the end of a token's step, is the engine's time; ``client_ns``, its departure here, the client's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import msgspec
import numpy as np

from ebbench.config.declare import MOST_SECONDS
from ebbench.devices.profiles import DATA, DeviceProfile
from ebbench.errors import UnknownNameError, UsageError
from ebbench.foreign.documents import load_toml
from ebbench.simulation.state import UNSET, Ints, RequestState
from ebbench.spec.server import AUTO, DEFAULT_CLASS, OFF, EngineOptions

# Costs, by class of machine: a file each.


def _check_times(costs: msgspec.Struct) -> None:
    for key in costs.__struct_fields__:
        value = getattr(costs, key)
        if key.endswith("_us") and not 0 <= value <= 1e6 * MOST_SECONDS:
            raise ValueError(f"{key} must be at least 0 and at most {1e6 * MOST_SECONDS:g} us, not {value:g}")


class WayCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a request takes from the client to the engine, in us: ``latency_us`` of no core (network, HTTP, hand-over,
    and the first token's way back), ``prompt_token_us`` of the tokenizer, which handles one prompt at a time."""

    latency_us: float
    prompt_token_us: float
    source: str

    def __post_init__(self) -> None:
        _check_times(self)


class FrontEndCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Time in us of one core of the API server, per streamed token and per request, and of its tokenizer, per token of
    a prompt.

    ``latency_us``: what every request takes besides, of no core. ``streams``: tokens wait for the core; otherwise they
    leave with their step, and only requests do. ``front_end``: of servers on this class of machine.
    """

    token_us: float
    request_us: float
    prompt_token_us: float
    source: str
    latency_us: float = 0.0
    streams: bool = True
    front_end: WayCosts | None = None

    def __post_init__(self) -> None:
        _check_times(self)

    @property
    def latency_ns(self) -> int:
        """Whole nanoseconds of a request that keep no core busy."""
        return round(self.latency_us * 1e3)

    @property
    def token_ns(self) -> int:
        """Whole nanoseconds per streamed token."""
        return round(self.token_us * 1e3)

    @property
    def request_ns(self) -> int:
        """Whole nanoseconds of the core per request."""
        return round(self.request_us * 1e3)

    def tokenizing_ns(self, prompt_tokens: int) -> int:
        """Whole nanoseconds of the tokenizer."""
        return round(self.prompt_token_us * prompt_tokens * 1e3)


_CLASSES = DATA / "api_servers"


@cache
def find_api_server(name: str) -> FrontEndCosts:
    """The costs of a class by name, or from a path ending in .toml. Raises UnknownNameError or InputFileError."""
    if name.endswith(".toml"):
        return load_toml(Path(name), FrontEndCosts)
    known = sorted(path.stem for path in _CLASSES.glob("*.toml"))
    if name not in known:
        raise UnknownNameError("API server", name, (*known, OFF, "FILE.toml"))
    return load_toml(_CLASSES / f"{name}.toml", FrontEndCosts)


def front_end_costs(options: EngineOptions, profile: DeviceProfile | None = None) -> FrontEndCosts:
    """Costs of what is between the clients and an engine with these options; zero if nothing is simulated there.

    The way is that of the profile's class of machine, with the latency that the options give instead; without the API
    server it is all there is. Raises UnknownNameError or InputFileError, and UsageError for processes without costs.
    """
    name, count = options.api_server, options.api_server_count
    if name == OFF and count is not None:
        raise UsageError(f"--api-server-count {count} needs the API server's costs: add --api-server {DEFAULT_CLASS}")
    server = None if name in (OFF, AUTO) else find_api_server(name)
    way = _way(options.front_end_ms, "" if profile is None else profile.front_end)
    if server is None:
        return FrontEndCosts(
            token_us=0.0, request_us=0.0, prompt_token_us=way.prompt_token_us, source=way.source,
            latency_us=way.latency_us, streams=False,
        )  # fmt: skip
    tokenizing_us = max(server.prompt_token_us, way.prompt_token_us)
    return msgspec.structs.replace(server, prompt_token_us=tokenizing_us, latency_us=way.latency_us)


def _way(latency_ms: float | None, machine: str) -> WayCosts:
    if latency_ms == 0 or (latency_ms is None and not machine):
        return WayCosts(latency_us=0.0, prompt_token_us=0.0, source="none")
    way = find_api_server(machine or DEFAULT_CLASS).front_end
    assert way is not None  # every bundled class has one
    return way if latency_ms is None else msgspec.structs.replace(way, latency_us=latency_ms * 1e3)


class FrontEnd:
    """The way to one engine instance, through the processes of its API server: requests go to them in turn.

    ``streams``: tokens wait for a process, and the times at which they leave are written to ``state.client_ns``; else
    they leave when their step ends.
    """

    def __init__(self, costs: FrontEndCosts, count: int, state: RequestState) -> None:
        """``count``: processes."""
        self._state, self._costs, self._token_ns = state, costs, costs.token_ns
        self.streams = costs.streams
        if self.streams and state.client_ns is None:
            state.client_ns = np.full(len(state.token_ns), UNSET, np.int64)
        self._client_ns = state.token_ns if state.client_ns is None else state.client_ns
        self._free_ns, self._tokenizer_free_ns = [0] * count, [0] * count
        self._next = 0
        self._process_of: Ints = np.zeros(state.count, np.int64)
        self._waits_ns: Ints = np.zeros(0, np.int64)  # token_ns times 1, 2, ...

    @classmethod
    def of(cls, options: EngineOptions, profile: DeviceProfile | None, units: int, state: RequestState) -> FrontEnd:
        """That of an instance of ``units`` data-parallel units, which have a process each unless a count is given."""
        return cls(front_end_costs(options, profile), options.api_server_count or units, state)

    @property
    def facts(self) -> dict[str, float]:
        """What every request takes besides waiting for processes, for the manifest; empty if that is nothing."""
        return {"front_end_ms": self._costs.latency_us / 1e3} if self._costs.latency_us else {}

    def enter(self, row: int, now_ns: int) -> int:
        """Handle a request that arrives at ``now_ns``; returns when it enters the engine, in ns."""
        process = self._next
        self._next = (process + 1) % len(self._free_ns)
        self._process_of[row] = process
        self._free_ns[process] = handled_ns = max(self._free_ns[process], now_ns) + self._costs.request_ns
        tokenizing_ns = self._costs.tokenizing_ns(int(self._state.prompt[row]))
        self._tokenizer_free_ns[process] = ready_ns = max(self._tokenizer_free_ns[process], handled_ns) + tokenizing_ns
        return ready_ns + self._costs.latency_ns

    def departed_ns(self, row: int) -> int:
        """When the last token of an ended request left."""
        return int(self._client_ns[self._state.next_slot[row] - 1])

    def stream(self, end_ns: int, rows: Ints, slots: Ints, tokens: Ints | None = None) -> None:
        """A step that ended at ``end_ns`` has one token of each of ``rows``, for these slots of ``client_ns``.

        ``tokens``: the number for each row, if it is not one. They fill the slots from that one on, and leave in one
        message, which takes as long as one token does.
        """
        if len(self._free_ns) == 1:
            self._stream(0, end_ns, slots)
        else:
            processes = self._process_of.take(rows)
            for process in range(len(self._free_ns)):
                self._stream(process, end_ns, slots[processes == process])
        if tokens is not None:
            for further in range(1, int(tokens.max(initial=0))):
                first = slots[tokens > further]
                self._client_ns[first + further] = self._client_ns[first]

    def _stream(self, process: int, end_ns: int, slots: Ints) -> None:
        count = len(slots)
        if not count:
            return
        start_ns = max(self._free_ns[process], end_ns)
        self._client_ns[slots] = start_ns + self._waits(count)
        self._free_ns[process] = start_ns + count * self._token_ns

    def stream_steps(self, ends_ns: Sequence[int], rows: Ints, slots: Ints) -> None:
        """Steps that ended at ``ends_ns`` have one token of every row each; the first step's belong to ``slots``."""
        if len(self._free_ns) == 1:
            self._stream_steps(0, ends_ns, slots)
            return
        processes = self._process_of.take(rows)
        for process in range(len(self._free_ns)):
            self._stream_steps(process, ends_ns, slots[processes == process])

    def _stream_steps(self, process: int, ends_ns: Sequence[int], slots: Ints) -> None:
        count, steps = len(slots), np.arange(len(ends_ns))
        if not count:
            return
        batch_ns = count * self._token_ns
        # The recursion start = max(end of the step, start before + batch), for all steps at once.
        latest = np.maximum.accumulate(np.asarray(ends_ns, np.int64) - batch_ns * steps)
        starts_ns = np.maximum(latest, self._free_ns[process]) + batch_ns * steps
        self._client_ns[slots[:, None] + steps] = starts_ns + self._waits(count)[:, None]
        self._free_ns[process] = int(starts_ns[-1]) + batch_ns

    def _waits(self, count: int) -> Ints:
        if len(self._waits_ns) < count:
            self._waits_ns = self._token_ns * np.arange(1, 2 * count + 1)
        return self._waits_ns[:count]
