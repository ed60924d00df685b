"""Options of the load generator, as the commands that measure a server take them; None is the default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ebbench.cli.options import opt
from ebbench.errors import UsageError

if TYPE_CHECKING:
    from ebbench.client import ClientOptions

_PANEL = "Client (with a server's URL)"


_opt = partial(opt, panel=_PANEL)

Endpoint = Annotated[str | None, _opt("--endpoint", help="completions (default) or chat.")]
Workers = Annotated[int | None, _opt("--workers", help="Client processes. Default: one for 512 open requests.")]
RampUp = Annotated[float | None, _opt("--ramp-up", help="Seconds over which the load grows to its full size.")]
ConnectTimeout = Annotated[float | None, _opt("--connect-timeout", help="Seconds to connect. Default: 10.")]
IdleTimeout = Annotated[
    float | None, _opt("--idle-timeout", help="Seconds to wait for the first and each further byte. Default: 300.")
]
TotalTimeout = Annotated[float | None, _opt("--total-timeout", help="Seconds for a whole request. Default: 3,600.")]
ReadyTimeout = Annotated[
    float | None,
    _opt("--ready-timeout", "--ready-check-timeout-sec", help="Seconds to wait for the server. Default: 5."),
]
IgnoreEos = Annotated[
    bool | None,
    _opt("--ignore-eos/--no-ignore-eos", help="Ask for exactly the planned tokens (default), or let answers end."),
]
Temperature = Annotated[float | None, _opt("--temperature", help="Sampling temperature. Default: 0.")]
ExtraBody = Annotated[str | None, _opt("--extra-body", help="JSON object merged into every request body.")]
Header = Annotated[list[str] | None, _opt("--header", help="KEY=VALUE, sent with every request; may be repeated.")]
VocabSize = Annotated[int | None, _opt("--vocab-size", help="Bound of synthetic token ids. Default: 30,000.")]
ResetPrefixCache = Annotated[
    bool | None,
    _opt("--reset-prefix-cache/--keep-prefix-cache", help="Empty the server's prefix cache before the run (default)."),
]
Insecure = Annotated[bool | None, _opt("--insecure", help="Do not verify TLS certificates.")]
SaveAsVllm = Annotated[
    Path | None, _opt("--save-as-vllm", help="Write the result also as `vllm bench serve` does (JSON).")
]


def client_options(base: ClientOptions, settings: Mapping[str, Any]) -> ClientOptions:
    """``base`` with the flags that were given (those not None). Raises UsageError."""
    from dataclasses import replace

    given = {name: value for name, value in settings.items() if value is not None}
    if "extra_body" in given:
        given["extra_body"] = _json_object(given["extra_body"])
    if "headers" in given:
        given["headers"] = _headers(given["headers"])
    if given.pop("insecure", False):
        given["verify_tls"] = False
    return replace(base, **given)


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
    headers = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"--header {pair!r} is not KEY=VALUE")
        if name.strip().lower() == "authorization":
            raise UsageError("give the API key in EBBENCH_API_KEY or OPENAI_API_KEY, not as --header")
        headers[name.strip()] = value
    return headers
