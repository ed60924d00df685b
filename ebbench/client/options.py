"""Settings of the load generator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ebbench.config.setting_strings import COUNT, NOT_NEGATIVE, PORT, POSITIVE, check_fields
from ebbench.credentials import api_key, forms_of
from ebbench.errors import UsageError

Endpoint = Literal["completions", "chat"]
Connecting = Literal["ahead", "on-demand", "per-request"]
_NOT_A_LIMIT = ("model", "prompt", "messages", "stream", "stream_options")


@dataclass(frozen=True)
class ClientOptions:
    """How a plan is sent to a server.

    ``model``: None asks the server. ``workers``: number of worker processes; None derives it from the load, 0 sends
    from the calling process (short runs, tests). ``client_nodes``: how many nodes of the Ray cluster at ``ray_address``
    (None: RAY_ADDRESS) send, each with ``workers``; None with an address: all of them.

    ``max_tokens_field``: name of the field that limits the output; None: max_tokens for completions,
    max_completion_tokens for chat. ``connections``: "ahead" opens some before requests need them, "on-demand" opens one
    when a request finds none idle, "per-request" closes each after one response.

    ``ignore_eos``: request exactly the planned number of tokens; fewer tokens are then a failure. ``vocab_size``: upper
    bound of synthetic token ids. ``extra_body`` and ``headers`` are added to every request; a null in ``extra_body``
    leaves a field out. ``warmup``: number of requests sent before the start and not recorded. ``idle_timeout_s``
    limits the wait for the first and for each further byte, ``total_timeout_s`` a whole request.
    ``metrics_interval_s``: how often /metrics is read; None never.

    ``drop_too_long``: leave out requests longer than ``max_model_len`` tokens (None asks the server) instead of
    refusing the plan. ``id_prefix`` precedes each request id in ``x-request-id``; None generates one, so that two
    clients do not use the same ids. ``keep_text``: keep the generated text in memory. ``slot_spacing_s``: time between
    the openings of new slots when a closed loop starts or raises its limit. ``transport``: "direct", or "httpx" for
    httpx's own transport, which honours proxies from the environment. ``ca_file`` (PEM): the only certificate
    authorities to trust; None uses SSL_CERT_FILE or the system's. ``lag_limit_ms``: a run whose p99 lag is higher is
    INVALID; None is the larger of 10 ms and 5 % of the median TTFT. ``power``: measure the power of this machine's
    GPUs; None: if the server is on this machine and NVML is available.

    ``metrics_port``: serve OpenMetrics of the running client there. ``otlp_endpoint``: send one span per request to
    this OpenTelemetry collector.
    """

    model: str | None = None
    endpoint: Endpoint = "completions"
    workers: int | None = None
    client_nodes: int | None = None
    ray_address: str | None = None
    ignore_eos: bool = True
    vocab_size: int = 30_000
    temperature: float | None = 0.0
    max_tokens_field: str | None = None
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
    connections: Connecting = "ahead"
    verify_tls: bool = True
    ca_file: str | None = None
    lag_limit_ms: float | None = None
    power: bool | None = None
    metrics_port: int | None = None
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        if self.endpoint not in ("completions", "chat"):
            raise UsageError(f"--endpoint must be completions or chat, not {self.endpoint!r}")
        check_fields(self, ("connect_timeout_s", "idle_timeout_s", "total_timeout_s"), POSITIVE)
        check_fields(self, ("warmup", "ready_timeout_s", "slot_spacing_s", "workers"), NOT_NEGATIVE)
        check_fields(self, ("vocab_size", "client_nodes"), COUNT)
        check_fields(self, ("metrics_port",), PORT)
        if self.connections not in get_args(Connecting):
            raise UsageError(f"--connections must be {', '.join(get_args(Connecting))}, not {self.connections!r}")
        if self.max_tokens_field in _NOT_A_LIMIT or self.max_tokens_field == "":
            raise UsageError(
                f"--max-tokens-field {self.max_tokens_field!r}: give the name of a field, such as max_tokens"
            )
        if any(set("\r\n") & set(f"{name}{value}") for name, value in self.headers.items()):
            raise UsageError("a header must not contain a line break")


def spacing_ns(options: ClientOptions) -> int:
    """``slot_spacing_s`` in ns."""
    return round(options.slot_spacing_s * 1e9)


def secrets(options: ClientOptions, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The API key and the values of headers, which :func:`ebbench.credentials.redacted` removes from output."""
    key = api_key(environ)
    return forms_of(([key] if key else []) + list(options.headers.values()))
