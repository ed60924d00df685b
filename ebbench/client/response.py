"""One streamed response while it arrives: times of messages, finish reason, usage, errors.

:meth:`StreamedResponse.feed` is the hot path: it runs once per network read. It decodes each message into typed
structures, so that a malformed message is always an error, and keeps one time per message.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import msgspec

from ebbench.client.sse import SseSplitter


class Usage(msgspec.Struct, gc=False):
    """Token counts as the server reports them in ``usage``."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: dict[str, Any] | None = None
    completion_tokens_details: dict[str, Any] | None = None


class _StreamedChoice(msgspec.Struct, gc=False):
    text: str | None = None
    finish_reason: str | None = None


class _Delta(msgspec.Struct, gc=False):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _ChatChoice(msgspec.Struct, gc=False):
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Completion(msgspec.Struct, gc=False):
    choices: list[_StreamedChoice] = []
    model: Any = None
    usage: Usage | None = None
    error: Any = None


class _Chat(msgspec.Struct, gc=False):
    choices: list[_ChatChoice] = []
    model: Any = None
    usage: Usage | None = None
    error: Any = None


MOST_MODELS, LONGEST_MODEL = 4, 200
"""Names of models that are kept of one response, and characters of each."""
_COMPLETION = msgspec.json.Decoder(_Completion)
_CHAT = msgspec.json.Decoder(_Chat)


class StreamedResponse:
    """What has been received of one response. All times are monotonic ns; 0 means "not yet".

    ``times_ns`` has one entry per message that may carry tokens; ``empty`` holds the positions of those without text (a
    token may decode to no text, and a closing message carries no token; :mod:`ebbench.client.classify` tells them apart
    by ``usage``). ``first_answer_ns``: first message of the answer after messages that the server marked as thinking
    (``delta.reasoning``, vLLM's name, or the older ``delta.reasoning_content``). ``models``: the models that the
    messages name, each change one entry, at most MOST_MODELS.
    """

    __slots__ = (
        "_chat",
        "_decode",
        "_splitter",
        "_texts",
        "done",
        "empty",
        "end_ns",
        "error_body",
        "error_class",
        "finish_reason",
        "first_answer_ns",
        "first_byte_ns",
        "first_on_connection",
        "last_ns",
        "models",
        "sent_ns",
        "status",
        "thinking_messages",
        "times_ns",
        "usage",
    )  # fmt: skip

    def __init__(self, chat: bool, keep_text: bool) -> None:
        self._chat = chat
        self._decode: Callable[[bytes], Any] = _CHAT.decode if chat else _COMPLETION.decode
        self._splitter: SseSplitter | None = None
        self._texts: list[str] | None = [] if keep_text else None
        self.times_ns: array[int] = array("q")
        self.empty: list[int] = []
        self.sent_ns = self.first_byte_ns = self.first_answer_ns = self.last_ns = self.end_ns = 0
        self.thinking_messages = 0
        self.models: list[str] = []
        self.finish_reason: str | None = None
        self.usage: Usage | None = None
        self.error_class: str | None = None
        self.error_body = ""
        self.status: int | None = None
        self.done = self.first_on_connection = False

    @property
    def model(self) -> str:
        """The model that the last message named; empty if none did."""
        return self.models[-1] if self.models else ""

    @property
    def text(self) -> str | None:
        """The generated text, or None without ``keep_text``."""
        return "".join(self._texts) if self._texts is not None else None

    @property
    def thinking_tokens(self) -> int | None:
        """Thinking tokens by the server's count, else the messages that carried them; None if it marked none."""
        if not self.thinking_messages:
            return None
        details = (self.usage.completion_tokens_details or {}) if self.usage is not None else {}
        counted = details.get("reasoning_tokens")
        return counted if isinstance(counted, int) and counted > 0 else self.thinking_messages

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
                self._event(data[6:-2], now_ns)
                return
            splitter = self._splitter = SseSplitter()
        for event in splitter.feed(data):
            self._event(event, now_ns)
        if not splitter.pending:
            self._splitter = None

    def fail(self, error_class: str, body: str) -> None:
        """Record the first error. Later errors follow from it and are dropped."""
        if self.error_class is None:
            self.error_class, self.error_body = error_class, body

    def _event(self, data: bytes, now_ns: int) -> None:
        try:
            message = self._decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            if data.strip() == b"[DONE]":
                self.done = True
            else:
                self.fail("malformed_frame", data.decode("utf-8", "backslashreplace"))
            return
        if isinstance(message.model, str) and message.model[:LONGEST_MODEL] != self.model:
            self.models[MOST_MODELS - 1 :] = [message.model[:LONGEST_MODEL]]
        choices = message.choices
        if choices:
            choice = choices[0]
            if self._chat:
                self._chat_choice(choice, now_ns)
            else:
                if not choice.text:
                    self.empty.append(len(self.times_ns))
                elif self._texts is not None:
                    self._texts.append(choice.text)
                self.times_ns.append(now_ns)
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason
        if message.usage is not None:
            self.usage = message.usage
        if message.error is not None:
            self.fail("error_frame", _error_text(message.error))
        elif not choices and message.usage is None:
            self._other_message(data)

    def _chat_choice(self, choice: _ChatChoice, now_ns: int) -> None:
        delta = choice.delta or _NO_DELTA
        thought = delta.reasoning or delta.reasoning_content
        text = delta.content or thought
        if thought:
            self.thinking_messages += 1
        elif self.thinking_messages and not self.first_answer_ns and (text or delta.tool_calls):
            self.first_answer_ns = now_ns
        if not text and not delta.tool_calls:
            if delta.role is not None and choice.finish_reason is None:
                return  # carries the role only, no token
            self.empty.append(len(self.times_ns))
        self.times_ns.append(now_ns)
        if delta.content and self._texts is not None:  # later turns repeat answers, not thinking
            self._texts.append(delta.content)

    def _other_message(self, data: bytes) -> None:
        """Record the error of a message that has neither choices nor usage: some servers put it at the top level."""
        message = msgspec.json.decode(data)
        if isinstance(message, dict) and message.get("object") == "error":
            self.fail("error_frame", _error_text(message))


_NO_DELTA = _Delta()


def _error_text(error: Any) -> str:
    """The server's error message if there is one, else the whole error object as text."""
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return str(error["message"])
    return error if isinstance(error, str) else msgspec.json.encode(error).decode()
