"""Costs of vLLM's API server, the process between clients and engine, by class of machine.

One process handles every prompt and every streamed token of its requests on one core, one at a time. Costs are read
from files in ``data/api_servers``, or from a user's file with the same keys, which
``tests/benchmarks/bench_api_server.py`` measures and prints.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import msgspec

from ebbench.devices.profiles import DATA
from ebbench.errors import UnknownNameError, UsageError
from ebbench.foreign.documents import load_toml
from ebbench.spec.server import OFF


class ApiServerCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Time of one core, in us: per streamed token, per request, and per token of its prompt."""

    token_us: float
    request_us: float
    prompt_token_us: float
    source: str

    def __post_init__(self) -> None:
        for key in ("token_us", "request_us", "prompt_token_us"):
            value = getattr(self, key)
            if not 0 <= value < math.inf:
                raise ValueError(f"{key} must be 0 or more us, not {value:g}")

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
