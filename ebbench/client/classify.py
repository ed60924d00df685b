"""Decide from what was received whether a response is complete, failed, timed out or cancelled. Pure functions."""

from __future__ import annotations

import errno
import re
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import httpx

from ebbench.client.response import StreamedResponse
from ebbench.records.schema import ABANDONED

_ABORT_REASONS = frozenset({"abort", "error"})  # finish reasons of a server that ended a response early
_OWN_LIMITS = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN, errno.EPERM}
)
"""Errors of opening a connection that lie with this machine: descriptors, ports, memory, a firewall's rule."""
HUNG_UP = "hung_up"
"""Error class of a response that the client did not wait for to the end, as the plan said."""
BODY_LIMIT = 4096
"""Characters of an error body that are kept, once secrets are removed: a cut could leave half of one."""


class TokenTimes(NamedTuple):
    """Times of the messages that carry tokens, and how many further tokens these messages carried together."""

    times_ns: array[int]
    bundled: int


class Classified(NamedTuple):
    """Status and error of one response. ``output_tokens`` is None if the server did not report it."""

    status: str
    error_class: str | None
    error_body: str | None
    output_tokens: int | None
    tokens: TokenTimes


def classify(streamed: StreamedResponse, planned_tokens: int, exact: bool) -> Classified:
    """Classify a response that was read to its end or until it failed.

    ``exact``: the server was asked to ignore the end-of-sequence token, so any other number of tokens than planned is a
    failure. The number of tokens is the one in ``usage``. Also failed: a stream without finish reason (truncated), a
    response that the server aborted, one without tokens, and one without ``usage``. A response that the client hung up
    on is abandoned, not failed; its tokens are those in the last ``usage``, else its messages.
    """
    count = streamed.usage.completion_tokens if streamed.usage is not None else None
    error_class, body = streamed.error_class, streamed.error_body
    if error_class is None:
        error_class, body = _failure(streamed, count, planned_tokens, exact)
    tokens = token_times(streamed.times_ns, streamed.empty, count)
    if error_class is None:
        return Classified("ok", None, None, count, tokens)
    status = "timed_out" if error_class.endswith("_timeout") else "failed"
    if error_class == "interrupted":
        status = "cancelled"
    if error_class == HUNG_UP:
        return Classified(ABANDONED, None, None, len(tokens.times_ns) + tokens.bundled, tokens)
    return Classified(status, error_class, body or None, count, tokens)


def _failure(streamed: StreamedResponse, count: int | None, planned_tokens: int, exact: bool) -> tuple[str | None, str]:
    """Error class and message of a stream without an error of its own; class None if the response is complete."""
    if streamed.finish_reason is None:
        return "truncated", f"the stream ended without a finish reason after {len(streamed.times_ns)} messages"
    if streamed.finish_reason in _ABORT_REASONS:
        ended = f"the server ended the response with finish reason '{streamed.finish_reason}'"
        return "aborted", f"{ended} after {len(streamed.times_ns)} messages"
    if count is None:
        return "no_usage", "the server reported no usage: the number of tokens is unknown"
    if count == 0 or not streamed.times_ns:
        return "empty_output", f"{count} tokens in {len(streamed.times_ns)} messages"
    if count < planned_tokens and exact:
        return "short_output", f"{count} tokens where {planned_tokens} were asked for with EOS ignored"
    if count > planned_tokens:
        return "long_output", f"{count} tokens where at most {planned_tokens} were asked for"
    return None, ""


def token_times(times_ns: Sequence[int], empty: Sequence[int], count: int | None) -> TokenTimes:
    """Match the messages with the server's token count.

    Messages without text count as tokens while the count leaves room for them, since a token may decode to no text; the
    last ones are dropped first, since a closing message carries no token. Tokens in excess of the messages came several
    per message. If a server splits tokens over several messages, the first message and the last ``count - 1`` are used.
    """
    times = array("q", times_ns)
    if count is None or count >= len(times):
        return TokenTimes(times, 0 if count is None or not times else count - len(times))
    for position in reversed(empty):
        if len(times) <= count:
            break
        del times[position]
    if len(times) > count:
        times = times[:1] + times[len(times) - count + 1 :] if count > 0 else array("q")
    return TokenTimes(times, 0)


def transport_failure(error: Exception) -> str:
    """The error class of an exception raised below HTTP."""
    if any(isinstance(one, OSError) and _OWN_LIMITS & _numbers(one) for one in _causes(error)):
        return "client_limit"
    if isinstance(error, httpx.ConnectTimeout):
        return "connect_timeout"
    if isinstance(error, httpx.TimeoutException):
        return "idle_timeout"
    if isinstance(error, httpx.ConnectError):
        return "connect_error"
    if isinstance(error, httpx.ReadError | httpx.WriteError):
        return "connection_reset"
    if isinstance(error, httpx.RemoteProtocolError):
        return "connection_closed"
    return "client_error"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The errors that led to ``error``, nearest first."""
    cause = error.__cause__ or error.__context__
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _numbers(error: OSError) -> set[int]:
    """The error numbers of a failed connection attempt; asyncio gives one text for several addresses."""
    return {error.errno} if error.errno else {int(number) for number in re.findall(r"Errno (\d+)", str(error))}
