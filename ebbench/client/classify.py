"""Whether an answer is complete, failed, timed out or cancelled: pure rules on what was received."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import httpx

from ebbench.client.answer import Answer

_GIVEN_UP = frozenset({"abort", "error"})  # finish reasons of a server that gave an answer up
BODY_LIMIT = 4096  # characters of an error body that are kept


class TokenTimes(NamedTuple):
    """Times of the messages that carry tokens, and how many further tokens came bundled in them."""

    times_ns: array[int]
    bundled: int


class Classified(NamedTuple):
    """Status and error of one answer. ``output_tokens`` is None where the server did not report it."""

    status: str
    error_class: str | None
    error_body: str | None
    output_tokens: int | None
    tokens: TokenTimes


def classify(answer: Answer, planned_tokens: int, exact: bool) -> Classified:
    """Classify a response that was read to its end (or to its failure).

    ``exact``: the end-of-sequence token was ignored, so any other number of tokens than planned is a failure.
    Usage decides the number of tokens. A stream without finish reason is truncated, that is failed, and so is an
    answer that the server gave up, one without tokens, or one without a reported number of tokens.
    """
    count = answer.usage.completion_tokens if answer.usage is not None else None
    error_class, body = answer.error_class, answer.error_body
    if error_class is None:
        error_class, body = _fault(answer, count, planned_tokens, exact)
    tokens = token_times(answer.times_ns, answer.empty, count)
    if error_class is None:
        return Classified("ok", None, None, count, tokens)
    status = "timed_out" if error_class.endswith("_timeout") else "failed"
    if error_class == "interrupted":
        status = "cancelled"
    return Classified(status, error_class, body[:BODY_LIMIT] or None, count, tokens)


def _fault(answer: Answer, count: int | None, planned_tokens: int, exact: bool) -> tuple[str | None, str]:
    """What is wrong with a stream that brought no error of its own; None if nothing."""
    if answer.finish_reason is None:
        return "truncated", f"the stream ended without a finish reason after {len(answer.times_ns)} messages"
    if answer.finish_reason in _GIVEN_UP:
        ended = f"the server ended the answer with finish reason '{answer.finish_reason}'"
        return "aborted", f"{ended} after {len(answer.times_ns)} messages"
    if count is None:
        return "no_usage", "the server reported no usage: the number of tokens is unknown"
    if count == 0 or not answer.times_ns:
        return "empty_output", f"{count} tokens in {len(answer.times_ns)} messages"
    if count < planned_tokens and exact:
        return "short_output", f"{count} tokens where {planned_tokens} were asked for with EOS ignored"
    if count > planned_tokens:
        return "long_output", f"{count} tokens where at most {planned_tokens} were asked for"
    return None, ""


def token_times(times_ns: Sequence[int], empty: Sequence[int], count: int | None) -> TokenTimes:
    """Reconcile messages with the server's token count.

    Messages without text are tokens as long as the count has room for them (a token may decode to nothing), the
    last ones being dropped first (a closing message has none). Tokens beyond the messages came bundled. Should
    a server cut tokens into several messages, the first message and the last ones count.
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
    """The error class of a failure below HTTP."""
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
