"""Options of the load generator for ``ebbench run`` with a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from ebbench.cli.options import opt
from ebbench.errors import UsageError

_PANEL = "Client (with a server's URL)"


_opt = partial(opt, panel=_PANEL)


@dataclass(frozen=True)
class ClientFlags:
    """Options of the load generator; None if not given."""

    ramp_up_s: Annotated[
        float | None, _opt("--ramp-up", help="Seconds over which the load grows to its full size.")
    ] = None
    endpoint: Annotated[str | None, _opt("--endpoint", help="completions (default) or chat.")] = None
    workers: Annotated[
        str | None,
        _opt(
            "--workers",
            help="Client processes (default: one for 512 open requests), or ray:N: N nodes of a Ray cluster send.",
        ),
    ] = None
    ray_address: Annotated[
        str | None,
        _opt(
            "--ray-address",
            help="auto or HOST:PORT of the cluster whose nodes send; without ray:N all. Default: RAY_ADDRESS.",
        ),
    ] = None
    connections: Annotated[
        str | None,
        _opt(
            "--connections",
            help="ahead (default: some are opened before requests need them), on-demand or per-request.",
        ),
    ] = None
    connect_timeout_s: Annotated[
        float | None,
        _opt("--connect-timeout", help="Seconds to connect. Default: 10."),
    ] = None
    idle_timeout_s: Annotated[
        float | None, _opt("--idle-timeout", help="Seconds to wait for the first and each further byte. Default: 300.")
    ] = None
    total_timeout_s: Annotated[
        float | None, _opt("--total-timeout", help="Seconds for a whole request. Default: 3,600.")
    ] = None
    ready_timeout_s: Annotated[
        float | None,
        _opt("--ready-timeout", "--ready-check-timeout-sec", help="Seconds to wait for the server. Default: 5."),
    ] = None
    ignore_eos: Annotated[
        bool | None,
        _opt(
            "--ignore-eos/--no-ignore-eos", help="Request exactly the planned tokens (default), or let responses end."
        ),
    ] = None
    temperature: Annotated[float | None, _opt("--temperature", help="Sampling temperature. Default: 0.")] = None
    max_tokens_field: Annotated[
        str | None,
        _opt(
            "--max-tokens-field",
            help="Field that limits the output. Default: max_tokens, for chat max_completion_tokens.",
        ),
    ] = None
    extra_body: Annotated[
        str | None, _opt("--extra-body", help="JSON object merged into every request body; null leaves a field out.")
    ] = None
    header: Annotated[
        list[str] | None, _opt("--header", help="KEY=VALUE, sent with every request; may be repeated.")
    ] = None
    vocab_size: Annotated[
        int | None,
        _opt("--vocab-size", help="Upper bound of synthetic token ids. Default: 30,000."),
    ] = None
    reset_prefix_cache: Annotated[
        bool | None,
        _opt(
            "--reset-prefix-cache/--keep-prefix-cache", help="Empty the server's prefix cache before the run (default)."
        ),
    ] = None
    ca_file: Annotated[
        str | None,
        _opt("--ca-file", help="Certificate authorities to trust (PEM). Default: SSL_CERT_FILE, else the system's."),
    ] = None
    lag_limit_ms: Annotated[
        float | None,
        _opt(
            "--lag-limit-ms",
            help="Largest p99 lag of the client; above it the run is INVALID. Default: 10 or 5 % of the median TTFT.",
        ),
    ] = None
    power: Annotated[
        bool | None,
        _opt(
            "--power/--no-power",
            help="Measure the power of this machine's GPUs. Default: where the server is on this machine.",
        ),
    ] = None
    metrics_port: Annotated[
        int | None, _opt("--metrics-port", help="Serve OpenMetrics of the running client on this port of 127.0.0.1.")
    ] = None
    otlp_endpoint: Annotated[
        str | None, _opt("--otlp-endpoint", help="Send one span per request to this OpenTelemetry collector (HTTP).")
    ] = None
    insecure: Annotated[bool | None, _opt("--insecure", help="Do not verify TLS certificates.")] = None

    def settings(self) -> dict[str, Any]:
        """The given options by the field names of ClientOptions. Raises UsageError.

        The ramp-up is not included: it is applied to the plan.
        """
        given = {name: value for name, value in vars(self).items() if value is not None and name != "ramp_up_s"}
        if "workers" in given:
            given |= _senders(given.pop("workers"))
        if "extra_body" in given:
            given["extra_body"] = _json_object(given["extra_body"])
        if "header" in given:
            given["headers"] = _headers(given.pop("header"))
        if "insecure" in given:
            given["verify_tls"] = not given.pop("insecure")
        return given


def _senders(text: str) -> dict[str, int]:
    """``4``: worker processes; ``ray:4``: nodes of a Ray cluster."""
    kind, colon, count = text.rpartition(":")
    if not count.isdecimal() or (colon and kind != "ray"):
        raise UsageError(f"--workers {text!r}: give a number of processes, such as 4, or of Ray nodes, such as ray:4")
    return {"client_nodes" if colon else "workers": int(count)}


def _json_object(text: str) -> dict[str, Any]:
    import json

    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--extra-body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UsageError('--extra-body must be a JSON object, such as {"top_p": 0.9}')
    return found


def _headers(pairs: Sequence[str]) -> dict[str, str]:
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
    return headers
