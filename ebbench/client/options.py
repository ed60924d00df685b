"""Settings of the load generator."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

from ebbench.errors import UsageError

Endpoint = Literal["completions", "chat"]
_SHORTEST_SECRET = 8
KEY_VARIABLES = ("EBBENCH_API_KEY", "OPENAI_API_KEY")


@dataclass(frozen=True)
class ClientOptions:
    """How a plan is sent to a server.

    ``model`` None asks the server. ``workers`` None chooses by the load; 0 runs in the calling process (short
    runs, tests). ``ignore_eos`` asks for exactly the planned number of tokens: fewer is then a failure.
    ``vocab_size`` bounds synthetic token ids. ``extra_body`` and ``headers`` are added to every request.
    ``warmup`` requests are sent before the start and not recorded. ``idle_timeout_s`` limits the wait for the
    first and for each further byte, ``total_timeout_s`` a whole request. ``metrics_interval_s`` None does not read
    /metrics.
    ``drop_too_long`` leaves out requests beyond ``max_model_len`` (None asks the server) instead of refusing the
    plan. ``id_prefix`` goes before each request id in ``x-request-id``; None makes one up, so that two clients
    never share ids. ``keep_text`` keeps the answers' text in memory. ``slot_spacing_s``: where
    a closed loop begins or raises its limit, the new slots open so far apart. ``transport`` "httpx" goes through
    httpx's own transport (proxies from the environment) instead of the direct one. ``ca_file`` (PEM) names the only
    certificate authorities to trust; None: those of SSL_CERT_FILE or the usual ones.
    ``lag_limit_ms``: p99 of the client's lag from which on a run is INVALID; None: 10 ms or 5 % of the median TTFT.
    """

    model: str | None = None
    endpoint: Endpoint = "completions"
    workers: int | None = None
    ignore_eos: bool = True
    vocab_size: int = 30_000
    temperature: float | None = 0.0
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    warmup: int = 0
    connect_timeout_s: float = 10.0
    idle_timeout_s: float = 300.0
    total_timeout_s: float = 3600.0
    ready_timeout_s: float = 5.0
    reset_prefix_cache: bool = True
    metrics_interval_s: float | None = 1.0
    drop_too_long: bool = False
    max_model_len: int | None = None
    id_prefix: str | None = None
    keep_text: bool = False
    slot_spacing_s: float = 0.0004
    transport: Literal["direct", "httpx"] = "direct"
    verify_tls: bool = True
    ca_file: str | None = None
    lag_limit_ms: float | None = None

    def __post_init__(self) -> None:
        if self.endpoint not in ("completions", "chat"):
            raise UsageError(f"--endpoint must be completions or chat, not {self.endpoint!r}")
        for name in ("connect_timeout_s", "idle_timeout_s", "total_timeout_s"):
            if not 0 < getattr(self, name) < inf:
                raise UsageError(f"--{name.removesuffix('_s').replace('_', '-')} must be positive")
        for name in ("warmup", "ready_timeout_s", "slot_spacing_s"):
            if not 0 <= getattr(self, name) < inf:
                raise UsageError(f"--{name.removesuffix('_s').replace('_', '-')} must be 0 or more")
        if self.workers is not None and self.workers < 0:
            raise UsageError("--workers must not be negative")
        if any(set("\r\n") & set(f"{name}{value}") for name, value in self.headers.items()):
            raise UsageError("a header must not contain a line break")
        if self.vocab_size < 1:
            raise UsageError("--vocab-size must be at least 1")


def spacing_ns(options: ClientOptions) -> int:
    """``slot_spacing_s`` in nanoseconds."""
    return round(options.slot_spacing_s * 1e9)


def api_key(environ: Mapping[str, str] = os.environ) -> str | None:
    """The API key, from the environment only. It is never stored, logged or sent anywhere but to the server."""
    return next((environ[name] for name in KEY_VARIABLES if environ.get(name)), None)


def secrets(options: ClientOptions, environ: Mapping[str, str]) -> tuple[str, ...]:
    """What must not show up anywhere: the API key, and header values of the user's that are long enough for one."""
    key = api_key(environ)
    long = [value for value in options.headers.values() if len(value) >= _SHORTEST_SECRET]
    return (key, *long) if key else tuple(long)


def redacted(text: str, hidden: tuple[str, ...]) -> str:
    """``text`` without secrets, should a server have repeated one."""
    for secret in hidden:
        text = text.replace(secret, "[hidden]")
    return text
