"""Costs of what is between clients and engine, by class of machine: vLLM's API server, and a request's way to it.

One process handles every prompt and every streamed token of its requests on one core, one at a time. Costs are read
from files in ``data/api_servers``, or from a user's file with the same keys, which
``tests/benchmarks/bench_api_server.py`` measures and prints.

The way of a request (its *front end*) keeps no core busy but for tokenizing its prompt: it is simulated wherever it is
known, while the process's other work is simulated only where it would be busy.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import msgspec

from ebbench.devices.profiles import DATA, DeviceProfile
from ebbench.errors import UnknownNameError, UsageError
from ebbench.foreign.documents import load_toml
from ebbench.spec.server import DEFAULT_CLASS, OFF, EngineOptions


def _check_times(costs: msgspec.Struct) -> None:
    for key in costs.__struct_fields__:
        value = getattr(costs, key)
        if key.endswith("_us") and not 0 <= value < math.inf:
            raise ValueError(f"{key} must be 0 or more us, not {value:g}")


class FrontEnd(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a request takes from the client to the engine, in us: ``latency_us`` of no core (network, HTTP, hand-over,
    and the first token's way back), ``prompt_token_us`` of the tokenizer, which handles one prompt at a time."""

    latency_us: float
    prompt_token_us: float
    source: str

    def __post_init__(self) -> None:
        _check_times(self)


class ApiServerCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Time of one core, in us: per streamed token, per request, and per token of its prompt.

    ``latency_us``: what every request takes besides, of no core. ``streams``: tokens wait for the core; otherwise they
    leave with their step, and only requests do. ``front_end``: of servers on this class of machine.
    """

    token_us: float
    request_us: float
    prompt_token_us: float
    source: str
    latency_us: float = 0.0
    streams: bool = True
    front_end: FrontEnd | None = None

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

    def request_ns(self, prompt_tokens: int) -> int:
        """Whole nanoseconds from the first byte of a request to its hand-over to the engine, without waiting."""
        return round((self.request_us + self.prompt_token_us * prompt_tokens) * 1e3)


def list_api_servers() -> tuple[str, ...]:
    """Names of the bundled classes."""
    return tuple(sorted(path.stem for path in (DATA / "api_servers").glob("*.toml")))


@cache
def find_api_server(name: str) -> ApiServerCosts:
    """The costs of a class by name, or from a path ending in .toml. Raises UnknownNameError or InputFileError."""
    if name.endswith(".toml"):
        return load_toml(Path(name), ApiServerCosts)
    if name not in list_api_servers():
        raise UnknownNameError("API server", name, (*list_api_servers(), OFF, "FILE.toml"))
    return load_toml(DATA / "api_servers" / f"{name}.toml", ApiServerCosts)


def answering_costs(options: EngineOptions, profile: DeviceProfile | None) -> ApiServerCosts | None:
    """Costs of what is between the clients and an engine with these options; None if nothing is simulated there.

    The front end is that of the profile's class of machine, with the latency that the options give instead; without the
    API server it is all there is. Raises UsageError as :func:`chosen_api_server`.
    """
    server = chosen_api_server(options.api_server, options.api_server_count)
    front = _front_end(options.front_end_ms, "" if profile is None else profile.front_end)
    if front is None:
        return server
    if server is None:
        return ApiServerCosts(
            token_us=0.0, request_us=0.0, prompt_token_us=front.prompt_token_us, source=front.source,
            latency_us=front.latency_us, streams=False,
        )  # fmt: skip
    tokenizing_us = max(server.prompt_token_us, front.prompt_token_us)
    return msgspec.structs.replace(server, prompt_token_us=tokenizing_us, latency_us=front.latency_us)


def _front_end(latency_ms: float | None, machine: str) -> FrontEnd | None:
    if latency_ms == 0 or (latency_ms is None and not machine):
        return None
    front = find_api_server(machine or DEFAULT_CLASS).front_end
    assert front is not None  # every bundled class has one
    return front if latency_ms is None else msgspec.structs.replace(front, latency_us=latency_ms * 1e3)


def chosen_api_server(name: str, count: int | None) -> ApiServerCosts | None:
    """The costs of the named class; None if the stage is off. Raises UsageError, also for a count without a class.

    ``count``: processes per engine instance; None is one per data-parallel unit, as vLLM has it.
    """
    if count is not None and count < 1:
        raise UsageError(f"--api-server-count must be at least 1, not {count}")
    if name == OFF:
        if count is not None:
            known = " or ".join(list_api_servers())
            raise UsageError(f"--api-server-count {count} needs the API server's costs: add --api-server {known}")
        return None
    return find_api_server(name)
