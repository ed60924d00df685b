"""Settings of the fake server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ebbench.config.declare import check_ranges, declare, named_settings, setting, settings_of, split_kind
from ebbench.errors import UsageError, check_known

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
    check_known("fault", kind, KINDS)
    return Fault(kind, **named_settings(rest, settings_of(Fault), f"fault {kind}"))


def pick(faults: Iterable[Fault], number: int) -> Fault | None:
    """The first fault that affects request ``number``, or None."""
    return next((f for f in faults if f.kind not in ("kill", "unready") and f.affects(number)), None)


def _uniform(number: int) -> float:
    """A fixed pseudo-random number in [0, 1) for a request number (Knuth's multiplicative hash, applied twice)."""
    mixed = (number * 2654435761) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 2246822519) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 13)) / 2**32


def read_models(names: Sequence[str]) -> dict[str, Any]:
    """``--model``, once or repeated."""
    return {"model": names[0], "further_models": tuple(names[1:])}


SERVED = "Options"


@dataclass(frozen=True)
class FakeConfig:
    """Settings of the fake server.

    Token i of a response is due exactly ``ttft_ms + i * itl_ms`` after the request was received. ``max_running``: its
    capacity; further requests wait in order of arrival. ``further_models`` are served in addition to ``model``, with
    the same responses. ``metrics_lines`` are added to /metrics, in Prometheus' text form.
    """

    port: int = declare(0, "TCP port on 127.0.0.1; 0 takes a free one.", SERVED, at_least=0, at_most=65535)
    ttft_ms: float = declare(20.0, "Time to the first token.", SERVED, at_least=0)
    itl_ms: float = declare(10.0, "Time between tokens.", SERVED, at_least=0)
    max_model_len: int = declare(1_000_000, "Longest prompt plus output, tokens.", SERVED)
    default_tokens: int = declare(16, "Output tokens of requests that set no length.", SERVED)
    ssl_certfile: str | None = declare(None, "Serve https with this PEM file.", SERVED)
    ssl_keyfile: str | None = declare(None, "Its key, if not in the same file.", SERVED)
    thinking_tokens: int = declare(0, "Thinking tokens that a chat response begins with.", SERVED, at_least=0)
    thinking_field: str = declare(
        "reasoning", "Field of the deltas: reasoning, or the older reasoning_content.", SERVED
    )
    max_running: int | None = declare(
        None, "Responses at a time; further requests wait. Default: all.", SERVED, at_least=1
    )
    keep_ledger: bool = declare(
        True, "Keep the ledger; without it memory stays constant.", SERVED, names=("--keep-ledger/--no-keep-ledger",)
    )
    model: str = declare(
        "fake-model", "Name of the model served; may be repeated. Default: fake-model.", SERVED, text=list[str],
        read=read_models,
    )  # fmt: skip
    further_models: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    faults: tuple[Fault, ...] = ()
    metrics_lines: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.thinking_field not in ("reasoning", "reasoning_content"):
            raise UsageError(f"--thinking-field is reasoning or reasoning_content, not {self.thinking_field!r}")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise UsageError("--ssl-keyfile goes with --ssl-certfile, whose key it is")
