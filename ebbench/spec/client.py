"""How a plan is sent to a server: settings of the load generator."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from ebbench.config.declare import CLIENT, MOST_SECONDS, check_range, check_ranges, declare, declared_in
from ebbench.config.server_url import Endpoint
from ebbench.errors import UsageError, check_known
from ebbench.network.credentials import api_key, written_forms
from vllm_eb.settings import Setting

if TYPE_CHECKING:
    import pyarrow as pa

# The limit on the lateness of sends, above which a run is INVALID.

LAG_FLOOR_MS = 10.0
LAG_SHARE_OF_TTFT = 0.05


def lag_limit_ms(requests: pa.Table, asked_ms: float | None = None) -> float:
    """The limit on the p99 lag in ms: ``asked_ms``, else the larger of 10 ms and 5 % of the median TTFT."""
    if asked_ms is not None:
        return asked_ms
    import pyarrow.compute as pc

    done = requests.filter(pc.equal(requests.column("status"), "ok"))
    ttft_ns = pc.subtract(done.column("first_token_ns"), done.column("intended_ns"))
    median_ns = pc.quantile(ttft_ns, 0.5)[0].as_py() or 0.0
    return max(LAG_FLOOR_MS, LAG_SHARE_OF_TTFT * median_ns / 1e6)


Connecting = Literal["ahead", "on-demand", "per-request"]
_NOT_A_LIMIT = ("model", "prompt", "messages", "stream", "stream_options")


def read_senders(text: str) -> dict[str, int]:
    """``4``: worker processes; ``ray:4``: nodes of a Ray cluster."""
    kind, colon, count = text.rpartition(":")
    if not count.isdecimal() or (colon and kind != "ray"):
        raise UsageError(f"--workers {text!r}: give a number of processes, such as 4, or of Ray nodes, such as ray:4")
    return {"client_nodes" if colon else "workers": int(count)}


def _json_object(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--extra-body is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise UsageError('--extra-body must be a JSON object, such as {"top_p": 0.9}')
    return {"extra_body": document}


def read_headers(pairs: Sequence[str]) -> dict[str, Any]:
    """``KEY=VALUE`` pairs. Raises UsageError for another form, a repeated key, and the API key."""
    headers: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"--header {pair!r} is not KEY=VALUE")
        if name.strip().lower() == "authorization":
            raise UsageError("give the API key in EBBENCH_API_KEY or OPENAI_API_KEY, not as --header")
        if name.strip().lower() in (known.lower() for known in headers):
            raise UsageError(f"--header: {name.strip()} is given twice; give it once")
        headers[name.strip()] = value
    return {"headers": headers}


@dataclass(frozen=True)
class ClientOptions:
    """Settings of the load generator. Raises UsageError for a value out of range."""

    # What the rest of the run says; set by the engine that sends.
    model: str | None = None
    """Model to request; None asks the server."""
    warmup: int = 0
    """Requests sent before the start and not recorded."""
    drop_too_long: bool = False
    """Leave out requests longer than ``max_model_len`` instead of refusing the plan."""
    max_model_len: int | None = None
    """Longest prompt plus output in tokens; None asks the server."""
    tokenizer: str | None = None
    """Counts the output tokens of a server that reports none; None fails such answers."""

    endpoint: Endpoint = declare(
        "completions",
        "completions, chat, responses, messages (Anthropic's), embeddings, rerank; a server's own API: sglang, "
        "llama.cpp, tgi, ollama, triton.", CLIENT, text=str,
    )  # fmt: skip
    documents: int = declare(
        8, "Documents per request of --endpoint rerank; the prompt's words are shared by query and documents.", CLIENT,
        at_least=1,
    )  # fmt: skip
    workers: int | None = declare(
        None, "Client processes (default: one for 512 open requests), or ray:N: N nodes of a Ray cluster send.", CLIENT,
        text=str, read=read_senders, at_least=0,
    )  # fmt: skip
    """0 sends from the calling process (short runs, tests). Of each node, if several send."""
    client_nodes: int | None = declare(None, "Nodes of a Ray cluster that send; None with an address: all.", at_least=1)
    ray_address: str | None = declare(
        None, "auto or HOST:PORT of the cluster whose nodes send; without ray:N all. Default: RAY_ADDRESS.", CLIENT
    )
    connections: Connecting = declare(
        "ahead", "ahead: some are opened before requests need them; on-demand; or per-request.", CLIENT, text=str
    )
    connect_timeout_s: float = declare(10.0, "Seconds to connect.", CLIENT, above=0, at_most=MOST_SECONDS)
    idle_timeout_s: float = declare(
        300.0, "Seconds to wait for the first and each further byte.", CLIENT, above=0, at_most=MOST_SECONDS
    )
    total_timeout_s: float = declare(3600.0, "Seconds for a whole request.", CLIENT, above=0, at_most=MOST_SECONDS)
    ready_timeout_s: float = declare(
        5.0, "Seconds to wait for the server.", CLIENT, names=("--ready-timeout", "--ready-check-timeout-sec"),
        at_least=0, at_most=MOST_SECONDS,
    )  # fmt: skip
    ignore_eos: bool = declare(
        True, "Request exactly the planned tokens, or let responses end.", CLIENT,
        names=("--ignore-eos/--no-ignore-eos",),
    )  # fmt: skip
    """If true, an answer with fewer tokens than planned is a failure."""
    temperature: float | None = declare(0.0, "Sampling temperature.", CLIENT, infinite=True)
    max_tokens_field: str | None = declare(
        None, "Field that limits the output. Default: that of the endpoint, for chat max_completion_tokens.", CLIENT
    )
    extra_body: Mapping[str, Any] = declare(
        default_factory=dict, help="JSON object merged into every request body; null leaves a field out.", panel=CLIENT,
        text=str, read=_json_object,
    )  # fmt: skip
    headers: Mapping[str, str] = declare(
        default_factory=dict, help="KEY=VALUE, sent with every request; may be repeated.", panel=CLIENT,
        names=("--header",), text=list[str], read=read_headers,
    )  # fmt: skip
    request_ids: bool = declare(
        True, "Send each request's id as x-request-id; some servers (llama-cpp-python) refuse ids that are no UUID.",
        CLIENT, names=("--request-ids/--no-request-ids",),
    )  # fmt: skip
    vocab_size: int = declare(30_000, "Upper bound of synthetic token ids.", CLIENT, at_least=1)
    reset_prefix_cache: bool = declare(
        True, "Empty the server's prefix cache before the run.", CLIENT,
        names=("--reset-prefix-cache/--keep-prefix-cache",),
    )  # fmt: skip
    ca_file: str | None = declare(
        None, "Certificate authorities to trust (PEM). Default: SSL_CERT_FILE, else the system's.", CLIENT
    )
    lag_limit_ms: float | None = declare(
        None, "Largest p99 lag of the client; above it the run is INVALID. Default: 10 or 5 % of the median TTFT.",
        CLIENT, infinite=True,
    )  # fmt: skip
    power: bool | None = declare(
        None, "Measure the power of this machine's GPUs. Default: where the server is on this machine.", CLIENT,
        names=("--power/--no-power",),
    )  # fmt: skip
    """None: if the server is on this machine and NVML is available."""
    metrics_port: int | None = declare(
        None, "Serve OpenMetrics of the running client on this port of 127.0.0.1.", CLIENT, at_least=0, at_most=65535
    )
    otlp_endpoint: str | None = declare(
        None, "Send one span per request to this OpenTelemetry collector (HTTP).", CLIENT
    )
    verify_tls: bool = declare(True, "Do not verify TLS certificates.", CLIENT, names=("--insecure",), turns_off=True)

    host_label: str | None = declare(
        None, "Name of the server's machine. Default: its address, or this machine's hardware.", CLIENT
    )

    # Without an option: for tests, and for code that sends by itself.
    metrics_interval_s: float | None = 1.0
    """How often /metrics is read; None never."""
    id_prefix: str | None = None
    """Precedes each request id in ``x-request-id``; None makes one up, so that two clients do not use the same ids."""
    keep_text: bool = False
    """Keep the generated text in memory."""
    slot_spacing_s: float = 0.0004
    """Time between the openings of new slots when a closed loop starts or raises its limit."""
    transport: Literal["direct", "httpx"] = "direct"
    """"httpx": its own transport, which honours proxies from the environment."""

    @property
    def on_nodes(self) -> bool:
        """Whether client machines of a Ray cluster send the plan."""
        return self.client_nodes is not None or self.ray_address is not None

    def __post_init__(self) -> None:
        check_known("endpoint", self.endpoint, get_args(Endpoint))
        check_ranges(self)
        for name, value in (("--warmup", self.warmup), ("--slot-spacing", self.slot_spacing_s)):
            check_range(name, value, Setting("", at_least=0))
        if self.max_tokens_field in _NOT_A_LIMIT or self.max_tokens_field == "":
            raise UsageError(
                f"--max-tokens-field {self.max_tokens_field!r}: give the name of a field, such as max_tokens"
            )
        if self.host_label is not None and not self.host_label.strip():
            raise UsageError("--host-label is empty; name the machine, or leave it out")
        if several := next((name for name in ("n", "best_of") if self.extra_body.get(name) not in (None, 1)), ""):
            raise UsageError(
                f"--extra-body {several}: the times of several answers are mixed in one stream; leave it out"
            )
        if any(set("\r\n") & set(f"{name}{value}") for name, value in self.headers.items()):
            raise UsageError("a header must not contain a line break")

    @property
    def generates(self) -> bool:
        """Whether answers have output tokens; those of embeddings and rerank are vectors and scores."""
        return self.endpoint not in ("embeddings", "rerank")

    def given(self) -> dict[str, Any]:
        """The declared settings that differ from their defaults."""
        return {
            name: getattr(self, name)
            for name, declared in declared_in(ClientOptions).items()
            if getattr(self, name) != declared.default
        }


def spacing_ns(options: ClientOptions) -> int:
    """``slot_spacing_s`` in ns."""
    return round(options.slot_spacing_s * 1e9)


def secrets(options: ClientOptions, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The API key and the values of headers, which :func:`ebbench.network.credentials.redacted` removes from output."""
    key = api_key(environ)
    return written_forms(([key] if key else []) + list(options.headers.values()))
