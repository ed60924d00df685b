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

_ABORT_REASONS = frozenset(
    {
        "abort", "aborted", "cancel", "cancelled", "canceled", "error", "error_finish", "failed", "internal_error",
        "server_error", "network_error", "timeout", "timed_out", "insufficient_system_resource",
    }
)  # fmt: skip
"""Finish reasons of a server that ended a response early."""
_OWN_LIMITS = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN, errno.EPERM}
)
"""Errors of opening a connection that lie with this machine: descriptors, ports, memory, a firewall's rule."""
HUNG_UP = "hung_up"
"""Error class of a response that the client did not wait for to the end, as the plan said."""
BODY_LIMIT = 4096
"""Characters of an error body that are kept, once secrets are removed: a cut could leave half of one."""


class TokenTimes(NamedTuple):
    """Times of the messages that carry tokens, and how many further tokens these messages carried together.

    ``first``: tokens that the first message carried.
    """

    times_ns: array[int]
    bundled: int
    first: int = 1


class FirstMessage(NamedTuple):
    """What is known of the first message with text: how many ``tokens`` it carried, its ``share`` of all text."""

    tokens: int | None = None
    share: float | None = None


class Classified(NamedTuple):
    """Status and error of one response. ``output_tokens`` is None if the server did not report it.

    ``hidden_tokens``: thinking that the server counts and did not send; ``tokens`` are those without it.
    """

    status: str
    error_class: str | None
    error_body: str | None
    output_tokens: int | None
    tokens: TokenTimes
    hidden_tokens: int = 0


def classify(streamed: StreamedResponse, planned_tokens: int, exact: bool) -> Classified:
    """Classify a response that was read to its end or until it failed.

    ``exact``: the server was asked to ignore the end-of-sequence token, so any other number of tokens than planned is a
    failure. The number of tokens is the one in ``usage``. Also failed: a stream without finish reason (truncated), a
    response that the server aborted, one without tokens, and one whose ``usage`` has no number of tokens. A response
    that the client hung up on is abandoned, not failed; its tokens are those in the last ``usage``, else its messages.
    """
    count = streamed.counts().completion
    error_class, body = streamed.error_class, streamed.error_body
    if error_class is None:
        error_class, body = _failure(streamed, count, planned_tokens, exact)
    if error_class is None:
        hidden = hidden_tokens(streamed)
        return Classified("ok", None, None, count, _tokens(streamed, count, hidden), hidden)
    if error_class == HUNG_UP:
        tokens = _tokens(streamed, None if count is None else min(count, planned_tokens))
        return Classified(ABANDONED, None, None, len(tokens.times_ns) + tokens.bundled, tokens)
    status = "timed_out" if error_class.endswith("_timeout") else "failed"
    if error_class == "interrupted":
        status = "cancelled"
    return Classified(status, error_class, body or None, count, _tokens(streamed, None))


def hidden_tokens(streamed: StreamedResponse) -> int:
    """Thinking tokens that the server counts as output but did not send: none of the messages carried thinking."""
    counts = streamed.counts()
    if streamed.thinking_messages or not counts.reasoning or counts.completion is None:
        return 0
    written = len(streamed.times_ns) - len(streamed.empty)
    return counts.reasoning if written <= counts.completion - counts.reasoning else 0


def _tokens(streamed: StreamedResponse, count: int | None, hidden: int = 0) -> TokenTimes:
    """The times of the tokens that were sent: ``count`` of the server, without the ``hidden`` ones."""
    share = streamed.first_letters / streamed.letters if streamed.letters else None
    first = FirstMessage(max((streamed.first_count or 0) - hidden, 0) or None, share)
    return token_times(streamed.times_ns, streamed.empty, None if count is None else count - hidden, first)


def _failure(streamed: StreamedResponse, count: int | None, planned_tokens: int, exact: bool) -> tuple[str | None, str]:
    """Error class and message of a stream without an error of its own; class None if the response is complete."""
    if streamed.finish_reason is None:
        said = f"; it also held: {streamed.stray}" if streamed.stray else ""
        return "truncated", f"the stream ended without a finish reason after {len(streamed.times_ns)} messages{said}"
    if streamed.finish_reason.lower() in _ABORT_REASONS:
        ended = f"the server ended the response with finish reason '{streamed.finish_reason}'"
        return "aborted", f"{ended} after {len(streamed.times_ns)} messages"
    if count is None:
        if odd := streamed.counts().odd.get("completion_tokens"):
            return "bad_usage", f"the server reported {odd} completion_tokens, which is no possible number of tokens"
        return "no_usage", "the server reported no usage: the number of tokens is unknown"
    if count == 0 or not streamed.times_ns:
        return "empty_output", f"{count} tokens in {len(streamed.times_ns)} messages"
    if count < planned_tokens and exact:
        return "short_output", f"{count} tokens where {planned_tokens} were asked for with EOS ignored"
    if count > planned_tokens:
        return "long_output", f"{count} tokens where at most {planned_tokens} were asked for"
    return None, ""


def token_times(
    times_ns: Sequence[int],
    empty: Sequence[int],
    count: int | None,
    first: FirstMessage = FirstMessage(),  # noqa: B008 - a constant
) -> TokenTimes:
    """Match the messages with the server's token count.

    Messages without text before the first one with text are no tokens: servers send them ahead of the prefill. Later
    ones are tokens while the count leaves room for them, since a token may decode to no text; the last ones are dropped
    first, since a closing message carries no token. With more tokens than messages of any kind the server puts several
    tokens into a message, and a message without text has none. If a server splits tokens over several messages, the
    first message and the last ``count - 1`` are used.
    """
    times = _times_of_tokens(times_ns, empty, count)
    if count is None or not times:
        return TokenTimes(times, 0)
    if len(times) > count:
        return TokenTimes(times[:1] + times[len(times) - count + 1 :] if count > 0 else array("q"), 0)
    spare = count - len(times)
    return TokenTimes(times, spare, _first_tokens(len(times), spare, len(_leading(times_ns, empty)), first))


def _leading(times_ns: Sequence[int], empty: Sequence[int]) -> Sequence[int]:
    """Positions of the messages without text before the first one with text; none if no message has text."""
    leading = [position for place, position in enumerate(empty) if place == position]
    return leading if len(empty) < len(times_ns) else ()


def _times_of_tokens(times_ns: Sequence[int], empty: Sequence[int], count: int | None) -> array[int]:
    times, leading = array("q", times_ns), len(_leading(times_ns, empty))
    written = len(times) - len(empty)
    several_in_one = count is not None and written and count > len(times)
    for position in reversed(empty[leading:]):
        if count is not None and (several_in_one or len(times) - leading > count):
            del times[position]
    return times[leading:]


def _first_tokens(messages: int, spare: int, leading: int, first: FirstMessage) -> int:
    """Tokens in the first of ``messages``, which carry ``spare`` more tokens than one each."""
    if spare <= leading:  # tokens without text came before it, one message each
        return 1 + spare
    share = 1 / messages if first.share is None else first.share
    return min(max(first.tokens or round((messages + spare) * share), 1), 1 + spare)


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
