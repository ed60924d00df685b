"""Settings of the fake server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ebbench.config.declare import (
    COUNT,
    NOT_NEGATIVE,
    PORT,
    check_fields,
    named_settings,
    setting,
    settings_of,
    split_kind,
)
from ebbench.errors import UnknownNameError, UsageError

# Faults of the fake server, and the requests that they affect.
#
# A fault is written `KIND[:key=value,...]`, for example `reset:every=10,after=5` or `status:code=429,rate=0.2`.

KINDS: Mapping[str, str] = {
    "kill": "the server process dies once `after` answers are complete",
    "refuse": "the connection is closed before any response",
    "reset": "the connection is reset (TCP RST) after `after` tokens",
    "close": "the connection is closed after `after` tokens, in the middle of the response",
    "truncate": "the stream ends cleanly after `after` tokens, without a finish reason",
    "malformed": "a frame that is not JSON follows after `after` tokens",
    "error-frame": "an error frame follows after `after` tokens of a 200 response",
    "status": "the response has status `code`; with `retry_after` a Retry-After header of so many seconds",
    "echo-auth": "a 401 whose body repeats the Authorization header",
    "stall": "nothing more is sent after `after` tokens; `after=-1` not even response headers",
    "empty": "an answer without tokens, finish reason stop",
    "short": "the answer stops after `after` tokens, finish reason stop",
    "no-usage": "no usage is reported",
    "miscount": "usage reports `factor` times the prompt tokens, as another tokenizer would",
    "cached": "usage reports the share `share` of the prompt tokens as found in a prefix cache",
    "bundle": "each message carries `tokens` tokens",
    "split": "every byte is sent on its own",
    "crlf": "lines end in CRLF, and comments stand between the messages",
    "unready": "/health answers 503 during the first `ms` milliseconds",
}


@dataclass(frozen=True)
class Fault:
    """One fault and the requests it affects: request numbers (from 1), every n-th, a share, or by default all.

    ``after`` counts tokens (complete responses for ``kill``).
    """

    kind: str
    request: int | None = setting(None, "number of the only affected request", at_least=1, example=3)
    every: int | None = setting(None, "affect every n-th request", unit="requests", at_least=1, example=10)
    rate: float | None = setting(None, "share of the requests that are affected", unit="share", at_least=0, at_most=1)
    after: int = setting(0, "tokens sent before the fault; for kill: complete responses", at_least=-1, example=5)
    code: int = setting(503, "status of the response", at_least=100, at_most=599)
    retry_after: int | None = setting(None, "Retry-After header", unit="s", at_least=0)
    factor: float = setting(1.3, "prompt tokens reported over prompt tokens sent", above=0)
    share: float = setting(0.5, "cached prompt tokens over prompt tokens", unit="share", at_least=0, at_most=1)
    tokens: int = setting(4, "tokens per message", at_least=1)
    ms: float = setting(0.0, "how long /health answers 503", unit="ms", at_least=0)

    def affects(self, number: int) -> bool:
        """Whether the fault affects request ``number`` (from 1); deterministic."""
        if self.request is not None:
            return number == self.request
        if self.every is not None:
            return number % self.every == 0
        return self.rate is None or _uniform(number) < self.rate


def parse_fault(text: str) -> Fault:
    """Parse ``KIND[:key=value,...]``. Raises UsageError that names the invalid part."""
    kind, rest = split_kind(text)
    if kind not in KINDS:
        raise UnknownNameError("fault", kind, KINDS)
    return Fault(kind, **named_settings(rest, settings_of(Fault), f"fault {kind}"))


def pick(faults: Iterable[Fault], number: int) -> Fault | None:
    """The first fault that affects request ``number``, or None."""
    return next((f for f in faults if f.kind not in ("kill", "unready") and f.affects(number)), None)


def _uniform(number: int) -> float:
    """A fixed pseudo-random number in [0, 1) for a request number (Knuth's multiplicative hash, applied twice)."""
    mixed = (number * 2654435761) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 2246822519) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 13)) / 2**32


@dataclass(frozen=True)
class FakeConfig:
    """Settings of the fake server.

    Token i of a response is due exactly ``ttft_ms + i * itl_ms`` after the request was received. ``default_tokens``:
    output length if the request sets none. ``port`` 0 takes a free one. ``keep_ledger`` False saves memory in long
    runs. ``max_running``: number of responses generated at the same time; further requests wait in order of arrival,
    which gives the server a known capacity. ``ssl_certfile`` and ``ssl_keyfile`` (PEM) switch to https.
    ``thinking_tokens``: a chat response begins with this many thinking tokens, in ``thinking_field`` of its deltas.
    ``further_models`` are served in addition to ``model``, with the same responses. ``metrics_lines`` are added to
    /metrics, in Prometheus' text form.
    """

    ttft_ms: float = 20.0
    itl_ms: float = 10.0
    host: str = "127.0.0.1"
    port: int = 0
    model: str = "fake-model"
    max_model_len: int = 1_000_000
    default_tokens: int = 16
    faults: tuple[Fault, ...] = ()
    keep_ledger: bool = True
    max_running: int | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    further_models: tuple[str, ...] = ()
    thinking_tokens: int = 0
    thinking_field: str = "reasoning"
    metrics_lines: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, ("ttft_ms", "itl_ms", "thinking_tokens"), NOT_NEGATIVE)
        if self.thinking_field not in ("reasoning", "reasoning_content"):
            raise UsageError(f"--thinking-field is reasoning or reasoning_content, not {self.thinking_field!r}")
        check_fields(self, ("max_running",), COUNT)
        check_fields(self, ("port",), PORT)
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise UsageError("--ssl-keyfile goes with --ssl-certfile, whose key it is")
