"""One streamed response while it arrives: times of messages, finish reason, usage, errors.

:meth:`StreamedResponse.feed` is the hot path: it runs once per network read. It decodes each message into typed
structures, so that a malformed message is always an error, and keeps one time per message.
"""

from __future__ import annotations

import errno
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from ebbench.client import stream_messages
from ebbench.client.dialects import (
    DIALECTS,
    Dialect,
    TokenCounts,
    Translated,
    draft_counts,
    shown,
    token_counts,
    whole_number,
)
from ebbench.client.stream_messages import ERROR, ChatChoice, Delta, Event, SseSplitter
from ebbench.network.connections import TransportError
from ebbench.records.schema import ABANDONED

_EVENT_LIMIT = 64 << 20  # bytes of one event that are held; log probabilities of a token can take megabytes
_STRAY_LIMIT = 64 << 10  # bytes kept of what is no message, to explain a stream that broke off
_SAYS_DRAFTS = re.compile(rb"acce|draft_n|spec_|tokens_per_iter")
"""In the names of all fields that say something of drafts; reading a message again is spared without."""
MOST_MODELS, LONGEST_MODEL = 4, 200
"""Names of models that are kept of one response, and characters of each."""


class StreamedResponse:
    """What has been received of one response. All times are monotonic ns; 0 means "not yet".

    ``times_ns`` has one entry per message that may carry tokens; ``empty`` holds the positions of those without text (a
    token may decode to no text, and a closing message carries no token; :mod:`ebbench.client.response` tells them apart
    by ``usage``). ``first_answer_ns``: first message of the answer after messages that the server marked as thinking
    (``delta.reasoning``, vLLM's name, or the older ``delta.reasoning_content``). ``letters``: length of the text of all
    messages, ``first_letters`` of the first one with text; ``first_count``: output tokens up to and with that message,
    where the server reports them there. ``usage`` is as the server sent it; :meth:`counts` has checked numbers.
    ``models``: the models that the messages name, each change one entry, at most MOST_MODELS.

    ``estimated``: the number of output tokens was counted by their text, not by the server.

    ``on_answered`` is called once the answer is known to be whole, or failed, although the body has not ended: at
    ``[DONE]`` after finish reason and usage, or after an error.
    """

    __slots__ = (
        "_chat",
        "_content_type",
        "_counts",
        "_decode",
        "_dialect",
        "_last",
        "_named",
        "_read",
        "_splitter",
        "_stray",
        "_texts",
        "_thoughts",
        "done",
        "empty",
        "end_ns",
        "error_body",
        "error_class",
        "estimated",
        "finish_reason",
        "first_answer_ns",
        "first_byte_ns",
        "first_count",
        "first_letters",
        "first_on_connection",
        "last_ns",
        "letters",
        "models",
        "on_answered",
        "sent_ns",
        "status",
        "thinking_letters",
        "thinking_messages",
        "times_ns",
        "usage",
    )  # fmt: skip

    whole = False
    """Whether the answer is one document, without output tokens."""

    def __init__(self, dialect: Dialect, keep_text: bool) -> None:
        self._dialect, self._read = dialect, dialect.reader()
        self._chat = dialect is not DIALECTS["completions"]
        self._decode = dialect.decoder(self._read)
        self._splitter: SseSplitter | None = None
        self._stray, self._content_type = b"", ""
        self._texts: list[str] | None = [] if keep_text else None
        self._thoughts: list[str] = []
        self.estimated = False
        self._counts: TokenCounts | None = None
        self.times_ns: array[int] = array("q")
        self.empty: list[int] = []
        self.letters = self.first_letters = 0
        self.first_count: int | None = None
        self.sent_ns = self.first_byte_ns = self.first_answer_ns = self.last_ns = self.end_ns = 0
        self.thinking_messages = self.thinking_letters = 0
        self.models: list[str] = []
        self._named: Any = None
        self.finish_reason: str | None = None
        self.usage: Any = None
        self._last: tuple[bytes, ...] = ()  # messages with the end and the counts, which may tell more
        self.error_class: str | None = None
        self.error_body = ""
        self.status: int | None = None
        self.done = self.first_on_connection = False
        self.on_answered: Callable[[], None] | None = None

    @property
    def model(self) -> str:
        """The model that the last message named; empty if none did."""
        return self.models[-1] if self.models else ""

    @property
    def text(self) -> str | None:
        """The generated text, or None without ``keep_text``."""
        return "".join(self._texts) if self._texts is not None else None

    @property
    def stray(self) -> str:
        """Beginning of what was received outside of messages, such as a proxy's error page; "" if nothing was."""
        return self._stray.decode("utf-8", "backslashreplace")

    def counts(self) -> TokenCounts:
        """The token counts that the server reported last, checked."""
        if self._counts is None:
            counts = token_counts(self.usage, self._dialect.counts)
            last = [stream_messages.parse_document(data) for data in reversed(self._last) if _SAYS_DRAFTS.search(data)]
            if last:
                odd = dict(counts.odd)
                counts = counts._replace(drafts=draft_counts(last, counts.completion, odd), odd=odd)
            self._counts = counts
        return self._counts

    @property
    def odd_count(self) -> str | None:
        """What the server reported where the number of output tokens should be, if it is no number of tokens."""
        odd = self.counts().odd
        return next((odd[name] for name in self._dialect.counts.completions if name in odd), None)

    def takes(self, content_type: str) -> bool:
        """Whether a content type is that of an answer."""
        self._content_type = content_type
        return self._dialect.takes(content_type)

    def estimate(self, count: Callable[[Sequence[str]], Iterable[int]]) -> None:
        """Count the output tokens by their text, where the server ended an answer without their number.

        ``count`` gives the tokens of each text; ``estimated`` tells that it was used. Needs ``keep_text``.
        """
        if self.counts().completion is not None or self.odd_count or self.error_class:
            return
        answer, thinking = map(int, count([self.text or "", "".join(self._thoughts)]))
        self._counts = self.counts()._replace(completion=answer + thinking, reasoning=thinking or None)
        self.estimated = True

    @property
    def thinking_tokens(self) -> int | None:
        """Thinking tokens by the server's count; None if it marked none.

        Without a count: one per message that carried thinking, and of the tokens beyond one per message the share of
        thinking in the text.
        """
        counts = self.counts()
        if not self.thinking_messages or counts.reasoning:
            return counts.reasoning if self.thinking_messages else None
        beyond = max((counts.completion or 0) - len(self.times_ns), 0)
        return self.thinking_messages + round(beyond * min(self.thinking_letters / self.letters, 1.0))

    def sent(self, now_ns: int) -> None:
        """Record the time at which the request was sent."""
        self.sent_ns = self.last_ns = now_ns

    def head(self, status: int, now_ns: int) -> None:
        """Record the HTTP status and the time at which the response headers were complete."""
        self.status = status
        self.first_byte_ns = self.first_byte_ns or now_ns
        self.last_ns = now_ns

    def feed(self, data: bytes, now_ns: int) -> None:
        """Process bytes of the event stream that were read at ``now_ns``."""
        self.last_ns = now_ns
        splitter = self._splitter
        if splitter is None:
            # Nearly every read is exactly one event. Any other read goes through the splitter, and so do all reads
            # after it until no partial event is left.
            if data.startswith(b"data: ") and data.find(b"\n") + 2 == len(data) and data.endswith(b"\n\n"):
                self._message(data[6:-2], now_ns)
                return
            splitter = self._splitter = SseSplitter(stream_messages.is_message)
        for event in splitter.feed(data):
            self._event(event, now_ns)
        if not splitter.pending:
            self._splitter = None
        elif splitter.held_bytes > _EVENT_LIMIT:
            self.fail("malformed_frame", f"an event of more than {_EVENT_LIMIT >> 20} MiB, or a line without an end")
            self._splitter = None
            self._answered()

    def ended(self) -> None:
        """Process what is left once the body has ended: a last event may lack its blank line."""
        if self._splitter is not None:
            for event in self._splitter.flush():
                self._event(event, self.last_ns)
        if self.stray and not self.times_ns and self._dialect.says_nothing(self._content_type):
            self._no_stream()
        if self._dialect.ends_with_body and self.times_ns and self.finish_reason is None:
            self.finish_reason = "end of the stream"

    def fail(self, error_class: str, body: str) -> None:
        """Record the first error. Later errors follow from it and are dropped."""
        if self.error_class is None:
            self.error_class, self.error_body = error_class, body

    def _event(self, event: Event, now_ns: int) -> None:
        data, kind = event
        if kind is None:
            self._keep_stray(data)
        elif kind == ERROR:
            self.fail("error_frame", stream_messages.reason_in(stream_messages.parse_document(data) or _text(data)))
        elif not stream_messages.is_keep_alive(data, kind):
            self._message(self._dialect.typed_message(data, kind), now_ns)

    def _message(self, data: bytes, now_ns: int) -> None:
        try:
            message = self._decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            message = self._unusual(data, now_ns)
        if message is None:
            return
        if message.model != self._named:
            self._name(message.model)
        choices: Sequence[Any] = message.choices
        if choices:
            choice = choices[0]
            if self._chat:
                self._chat_choice(choice, data, now_ns)
            else:
                text = choice.text
                if not text:
                    self.empty.append(len(self.times_ns))
                else:
                    if not self.letters:
                        self.first_letters = len(text)
                    self.letters += len(text)
                    if self._texts is not None:
                        self._texts.append(text)
                self.times_ns.append(now_ns)
            if choice.finish_reason and stream_messages.is_finish_reason(choice.finish_reason):
                self.finish_reason = choice.finish_reason
            if choice.error:
                self.fail("error_frame", stream_messages.reason_in(choice.error))
        usage = message.usage or (choices and choices[0].usage)
        if usage:
            self._count(usage)
        if usage or self.finish_reason:
            self._last = (*self._last[-1:], data)
        if message.error:
            self._failed(message.error, data)
        elif isinstance(message, Translated):
            self._end(message, data)
        elif not choices and (not usage or stream_messages.may_report_failure(data)):
            self._without_choices(data)

    def _end(self, message: Translated, data: bytes) -> None:
        """Record usage, finish reason and errors in a message of another API."""
        if stream_messages.is_finish_reason(message.finish_reason):
            self.finish_reason = message.finish_reason
        if message.done:
            self._done()
        elif not (message.choices or message.usage or message.finish_reason or message.model):
            self._without_choices(data)

    def _done(self) -> None:
        """The server marked the end of the answer."""
        self.done = True
        if self.error_class or (self.finish_reason and self.usage):
            self._answered()

    def _name(self, model: Any) -> None:
        """Keep the model that a message names, if it is another than before."""
        self._named = model
        if isinstance(model, str) and model[:LONGEST_MODEL] != self.model:
            self.models[MOST_MODELS - 1 :] = [model[:LONGEST_MODEL]]

    def _chat_choice(self, choice: ChatChoice, data: bytes, now_ns: int) -> None:
        delta = choice.delta or _NO_DELTA
        answer, called = delta.content or delta.refusal or "", delta.tool_calls or delta.function_call
        thought = delta.reasoning or delta.reasoning_content or ""
        if not (answer or thought or called):
            thought = stream_messages.thinking_elsewhere(data)
        if thought:
            self.thinking_messages += 1
            self.thinking_letters += len(thought)
        if self.thinking_messages and not self.first_answer_ns and (answer or called):
            self.first_answer_ns = now_ns  # also in the message that ends the thinking
        if answer or thought:
            letters = len(answer) + len(thought)
            if not self.letters:
                self.first_letters = letters
            self.letters += letters
        elif not called:
            if delta.role is not None and not choice.finish_reason and not self.times_ns:
                return  # carries the role only, no token; some servers repeat it in each message
            self.empty.append(len(self.times_ns))
        self.times_ns.append(now_ns)
        if self._texts is not None:  # apart, since later turns repeat answers, not thinking
            if answer:
                self._texts.append(answer)
            if thought:
                self._thoughts.append(thought)

    def _count(self, usage: Any) -> None:
        fields = self._dialect.counts
        if fields.beside and isinstance(self.usage, dict) and isinstance(usage, dict):  # the last one may be a part
            usage = self.usage | {name: value for name, value in usage.items() if value or name not in self.usage}
        self.usage, self._counts = usage, None
        if len(self.times_ns) == len(self.empty) + 1 and isinstance(usage, dict):
            self.first_count = whole_number(usage.get(fields.completion))

    def _unusual(self, data: bytes, now_ns: int) -> Any:
        """A message that is not of the usual form; None if it is none and what it says has been recorded."""
        if data.strip() == stream_messages.DONE:
            self._done()
        elif (document := stream_messages.parse_document(data)) is not None:
            return self._read(document)
        elif b"\n" in data or (joined := stream_messages.joined_messages(data)):
            # several messages without the blank line, or even the line end, between them
            for line in data.split(b"\n") if b"\n" in data else joined:
                self._event(Event(line), now_ns)
        elif not stream_messages.is_keep_alive(data):
            self.fail("malformed_frame", _text(data))
        return None

    def _answered(self) -> None:
        if self.on_answered is not None:
            self.on_answered()

    def _without_choices(self, data: bytes) -> None:
        """Record the failure that a message without choices may report; keep it as an explanation otherwise."""
        document = stream_messages.parse_document(data) or {}
        if stream_messages.failure_in(document):
            self.fail("error_frame", stream_messages.reason_in(document))
        elif document and not document.get("usage"):
            self._keep_stray(data)

    def _failed(self, error: Any, data: bytes) -> None:
        """Record an error; where it is a mere number or true, the message beside it says more."""
        details = error if isinstance(error, str | dict | list) else stream_messages.parse_document(data)
        self.fail("error_frame", stream_messages.reason_in(details))

    def _keep_stray(self, data: bytes) -> None:
        if len(self._stray) < _STRAY_LIMIT:
            self._stray = b"\n".join(filter(None, (self._stray, data)))[:_STRAY_LIMIT]
        elif not self.times_ns:
            self._no_stream()
            self._answered()

    def _no_stream(self) -> None:
        told = f"(Content-Type: {self._content_type}) " if self._content_type else ""
        self.fail("not_a_stream", told + self.stray)


_NO_DELTA = Delta()


class WholeResponse(StreamedResponse):
    """A response of one JSON document, whose time is that of its last byte."""

    __slots__ = ("_held_bytes", "_parts")
    whole = True

    def __init__(self, dialect: Dialect, keep_text: bool) -> None:
        super().__init__(dialect, keep_text)
        self._parts: list[bytes] = []
        self._held_bytes = 0

    def feed(self, data: bytes, now_ns: int) -> None:
        """Keep bytes of the document that were read at ``now_ns``."""
        self.last_ns = now_ns
        self._parts.append(data)
        self._held_bytes += len(data)
        if self._held_bytes > _EVENT_LIMIT:
            self.fail("malformed_frame", f"a document of more than {_EVENT_LIMIT >> 20} MiB")
            self._answered()

    def ended(self) -> None:
        """Read the document."""
        data = b"".join(self._parts)
        self._message(b'{"results":%b}' % data if data.lstrip().startswith(b"[") else data, self.last_ns)
        self.times_ns.append(self.last_ns)


def response_to(dialect: Dialect, keep_text: bool) -> StreamedResponse:
    """An empty response to a request of an endpoint."""
    return (WholeResponse if dialect.whole else StreamedResponse)(dialect, keep_text)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


# Decide from what was received whether a response is complete, failed, timed out or cancelled. Pure functions.

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
    response that the server aborted, one without tokens, and one without a number of tokens; an estimated number may
    be any. A response
    that the client hung up on is abandoned, not failed; its tokens are those in the last ``usage``, else its messages.
    """
    count = streamed.counts().completion
    error_class, body = streamed.error_class, streamed.error_body
    if error_class is None:
        error_class, body = _failure(streamed, count, planned_tokens, exact)
    if error_class is None:
        if streamed.whole:
            return Classified("ok", None, None, None, TokenTimes(streamed.times_ns, 0))
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
    if streamed.finish_reason is None and streamed.whole:
        return "empty_output", f"no vectors or scores in the answer{f': {streamed.stray}' if streamed.stray else ''}"
    if streamed.finish_reason is None:
        stray = f"; it also held: {streamed.stray}" if streamed.stray else ""
        return "truncated", f"the stream ended without a finish reason after {len(streamed.times_ns)} messages{stray}"
    if streamed.finish_reason.lower() in _ABORT_REASONS:
        ended = f"the server ended the response with finish reason '{streamed.finish_reason}'"
        return "aborted", f"{ended} after {len(streamed.times_ns)} messages"
    if streamed.whole:
        return None, ""
    if count is None:
        if odd := streamed.odd_count:
            return "bad_usage", f"the server reported {odd} output tokens, which is no possible number of tokens"
        given = f"the usage {shown(streamed.usage)[:200]}" if streamed.usage else "no usage"
        return "no_usage", f"the server reported {given}: the number of output tokens is unknown"
    if count == 0 or not streamed.times_ns:
        return "empty_output", f"{count} tokens in {len(streamed.times_ns)} messages"
    if streamed.estimated:
        return None, ""
    if count < planned_tokens and exact:
        ended = f"with EOS ignored, finish reason '{streamed.finish_reason}'"
        return "short_output", f"{count} tokens where {planned_tokens} were asked for {ended}"
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


def transport_failure(error: TransportError) -> str:
    """The error class of an exchange that failed below HTTP."""
    if any(isinstance(cause, OSError) and _OWN_LIMITS & _numbers(cause) for cause in _causes(error)):
        return "client_limit"
    return error.error_class


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The errors that led to ``error``, nearest first."""
    cause = error.__cause__ or error.__context__
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _numbers(error: OSError) -> set[int]:
    """The error numbers of a failed connection attempt; asyncio gives one text for several addresses."""
    return {error.errno} if error.errno else {int(number) for number in re.findall(r"Errno (\d+)", str(error))}
