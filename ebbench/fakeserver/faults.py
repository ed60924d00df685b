"""Faults the fake server can be told to commit, and on which requests.

A fault is written ``KIND[:key=value,...]``, for example ``reset:every=10,after=5`` or ``status:code=429,rate=0.2``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ebbench.errors import UnknownNameError, UsageError

KINDS: Mapping[str, str] = {
    "kill": "the server process dies once `after` answers are complete",
    "refuse": "the connection is closed before any response",
    "reset": "the connection is reset (TCP RST) after `after` tokens",
    "close": "the connection is closed after `after` tokens, in the middle of the response",
    "truncate": "the stream ends cleanly after `after` tokens, without a finish reason",
    "malformed": "a frame that is no JSON follows after `after` tokens",
    "error-frame": "an error frame follows after `after` tokens of a 200 response",
    "status": "the response has status `code`; with `retry_after` a Retry-After header of so many seconds",
    "echo-auth": "a 401 whose body repeats the Authorization header",
    "stall": "nothing more is sent after `after` tokens; `after=-1` not even response headers",
    "empty": "an answer without tokens, finish reason stop",
    "short": "the answer stops after `after` tokens, finish reason stop",
    "no-usage": "no usage is reported",
    "miscount": "usage reports `factor` times the prompt tokens, as another tokenizer would",
    "bundle": "each message carries `tokens` tokens",
    "split": "every byte is sent on its own",
    "crlf": "lines end in CRLF, and comments stand between the messages",
    "unready": "/health answers 503 during the first `ms` milliseconds",
}


@dataclass(frozen=True)
class Fault:
    """One fault and the requests it strikes: numbers (from 1), every n-th, a share, or all by default.

    ``after`` counts tokens (completed answers for ``kill``).
    """

    kind: str
    request: int | None = None
    every: int | None = None
    rate: float | None = None
    after: int = 0
    code: int = 503
    retry_after: int | None = None
    factor: float = 1.3
    tokens: int = 4
    ms: float = 0.0

    def strikes(self, number: int) -> bool:
        """Whether request ``number`` (from 1) is struck; the same answer each time."""
        if self.request is not None:
            return number == self.request
        if self.every is not None:
            return number % self.every == 0
        return self.rate is None or _unit(number) < self.rate


def parse_fault(text: str) -> Fault:
    """Parse ``KIND[:key=value,...]``. Raises UsageError naming what is wrong."""
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise UnknownNameError("fault", kind, KINDS)
    fault = Fault(kind)
    known = {f.name: f for f in fields(Fault) if f.name != "kind"}
    for pair in filter(None, rest.split(",")):
        key, _, value = pair.partition("=")
        if key not in known:
            raise UnknownNameError(f"setting of fault {kind}", key, known)
        number: Any = float if "float" in str(known[key].type) else int
        try:
            fault = replace(fault, **{key: number(value)})
        except ValueError:
            raise UsageError(f"fault {kind}: {key}={value!r} is not a number") from None
    if fault.every is not None and fault.every < 1:
        raise UsageError(f"fault {kind}: every={fault.every} must be at least 1")
    return fault


def pick(faults: Iterable[Fault], number: int) -> Fault | None:
    """The first fault that strikes request ``number``, or None."""
    return next((f for f in faults if f.kind not in ("kill", "unready") and f.strikes(number)), None)


def _unit(number: int) -> float:
    """A fixed pseudo-random number in [0, 1) per request number (Knuth's multiplicative hash, twice)."""
    mixed = (number * 2654435761) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 2246822519) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 13)) / 2**32
