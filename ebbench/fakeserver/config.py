"""Settings of the fake server."""

from __future__ import annotations

from dataclasses import dataclass

from ebbench.config.setting_strings import COUNT, NOT_NEGATIVE, PORT, check_fields
from ebbench.errors import UsageError
from ebbench.fakeserver.faults import Fault


@dataclass(frozen=True)
class FakeConfig:
    """Settings of the fake server.

    Token i of a response is due exactly ``ttft_ms + i * itl_ms`` after the request was received. ``default_tokens``:
    output length if the request sets none. ``port`` 0 takes a free one. ``keep_ledger`` False saves memory in long
    runs. ``max_running``: number of responses generated at the same time; further requests wait in order of arrival,
    which gives the server a known capacity. ``ssl_certfile`` and ``ssl_keyfile`` (PEM) switch to https.
    ``thinking_tokens``: a chat response begins with so many thinking tokens, in ``thinking_field`` of its deltas.
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
