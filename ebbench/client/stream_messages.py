"""Server-sent events, and the messages of OpenAI's completions and chat in them, as servers write them.

:func:`decoder` is for the usual message, decoded into typed structures in about a microsecond. What it refuses may be a
message that the OpenAI clients accept (``choices`` null, text that is not UTF-8, NaN among the log probabilities), and
goes through :func:`tolerant`. :func:`failure_in` and :func:`reason_in` find what a server says about a failure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

# Splits a byte stream into server-sent events (WHATWG HTML, section 9.2.6), with what servers make of them.
#
# It works on bytes, so reads may split a UTF-8 sequence or a line end anywhere. Beyond the standard: a line that is a
# message by itself is given out at once, since some servers leave out the blank line after it; a line that begins
# with `{` counts as data; and lines that are no field at all are given out, since they may say why a stream broke
# off.

_BOM = b"\xef\xbb\xbf"
_IGNORED = frozenset({b"", b"id", b"retry"})  # a line without a name before its colon is a comment
_MANY_LINES = 1000
"""Lines of data from which on only a blank line ends a message: each new line is checked together with those before."""
ERROR = b"error"
"""Type of an event that reports an error: of ``event: error``, and of a field ``error:`` (llama.cpp)."""


class Event(NamedTuple):
    """The data of one event. ``kind``: its ``event`` field, empty without one; None for a line outside the format."""

    data: bytes
    kind: bytes | None = b""


class SseSplitter:
    """Yields each complete event and keeps the incomplete rest.

    ``is_message``: tells whether data is a whole message, which no further line continues.
    """

    __slots__ = ("_after_cr", "_data", "_is_message", "_kind", "_pieces", "_started", "_tail")

    def __init__(self, is_message: Callable[[bytes], bool] = lambda _: False) -> None:
        self._is_message = is_message
        self._tail = self._kind = b""
        self._pieces: list[bytes] = []  # of a long line after _tail, joined once its end has come
        self._data: list[bytes] = []
        self._after_cr = self._started = False

    def feed(self, received: bytes) -> Iterator[Event]:
        """Yield the events that ``received`` completes."""
        if self._started and self._tail and b"\n" not in received and b"\r" not in received:
            self._pieces.append(received)
            return
        buffer = b"".join((self._tail, *self._pieces, received)) if self._tail else received
        self._pieces.clear()
        if not self._started:
            if len(buffer) < len(_BOM) and _BOM.startswith(buffer):
                self._tail = buffer
                return
            buffer, self._started = buffer.removeprefix(_BOM), True
        if self._after_cr and buffer:
            # The line ended at CR; a LF that follows belongs to it.
            buffer, self._after_cr = buffer.removeprefix(b"\n"), False
        lines = buffer.splitlines(keepends=True)
        self._tail = lines.pop() if lines and not lines[-1].endswith((b"\n", b"\r")) else b""
        self._after_cr = bool(lines) and not self._tail and lines[-1].endswith(b"\r")
        for line in lines:
            stripped = line.rstrip(b"\r\n")
            if stripped:
                yield from self._line(stripped)
            else:
                yield from self._end()

    def flush(self) -> Iterator[Event]:
        """Yield what is left at the end of the stream: a last event without its line end or blank line.

        An event that broke off is given out as a line outside the format.
        """
        tail = b"".join((self._tail, *self._pieces))
        self._tail, self._pieces = b"", []
        if tail:
            yield from self._line(tail)
        for event in self._end():
            yield event if self._is_message(event.data) else Event(event.data, None)

    @property
    def pending(self) -> bool:
        """Whether an unfinished event or half a line end is held."""
        return bool(self._tail or self._data or self._kind or self._after_cr)

    @property
    def held_bytes(self) -> int:
        """Size of the unfinished event."""
        return len(self._tail) + sum(map(len, self._pieces)) + sum(map(len, self._data))

    def _line(self, line: bytes) -> Iterator[Event]:
        name, _, value = line.partition(b":")
        if name == b"data":
            yield from self._add(value.removeprefix(b" "))
        elif name == b"event":
            self._kind = value.strip()
        elif name == ERROR:
            yield Event(value.strip(), ERROR)
        elif line.startswith(b"{") or self._data:
            yield from self._add(line)
        elif name not in _IGNORED:
            yield Event(line, None)

    def _add(self, line: bytes) -> Iterator[Event]:
        self._data.append(line)
        data = b"\n".join(self._data) if len(self._data) < _MANY_LINES else b""
        if self._is_message(data):
            self._data = []
            yield Event(data, self._kind)

    def _end(self) -> Iterator[Event]:
        data, kind = self._data, self._kind
        self._data, self._kind = [], b""
        if data:
            yield Event(b"\n".join(data), kind)


DONE = b"[DONE]"
_KEEP_ALIVE = re.compile(rb":.*|keep-?alive|ping|heartbeat|null|", re.DOTALL | re.IGNORECASE)
_BETWEEN = re.compile(r"\s*(?:data:)?\s*")
_JSON = json.JSONDecoder()
_MOST_DIGITS = 400
_KEEP_ALIVE_KINDS = frozenset({b"ping", b"keep-alive", b"keepalive", b"heartbeat"})
_REASON_FIELDS = (
    "message", "msg", "detail", "error_message", "faultstring", "error", "errors", "exception", "fault", "reason",
    "text", "response",
)  # fmt: skip
"""Where servers put the reason of a failure, most telling first."""
_FAILURE_FIELDS = ("error", "errors", "error_code", "error_message", "detail", "exception", "fault")
"""Fields of which one is in a message that reports a failure."""
_MAY_FAIL = re.compile(
    rb'"(?:%b|success|type|status|code|status_code|object"\s*:\s*"error)"' % "|".join(_FAILURE_FIELDS).encode()
)
_FAILED_STATES = frozenset({"error", "failed", "failure"})
_NO_REASON = frozenset({"", "null", "none", "undefined", "unspecified", "finish_reason_unspecified"})
"""What servers write for a finish reason while there is none."""


class Choice(msgspec.Struct, gc=False):
    """A choice of the completions endpoint. Few servers have the ``usage`` in it (Moonshot)."""

    text: str | None = None
    finish_reason: str | None = None
    error: Any = None
    usage: Any = None


class Delta(msgspec.Struct, gc=False):
    """What a message of the chat endpoint adds to the answer."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: Any = None
    function_call: Any = None


class ChatChoice(msgspec.Struct, gc=False):
    """A choice of the chat endpoint."""

    delta: Delta | None = None
    finish_reason: str | None = None
    error: Any = None
    usage: Any = None


class Completion(msgspec.Struct, gc=False):
    """A message of the completions endpoint. Its ``usage`` is as the server sent it, unchecked."""

    choices: list[Choice] = []
    model: Any = None
    usage: Any = None
    error: Any = None


class Chat(msgspec.Struct, gc=False):
    """A message of the chat endpoint. Its ``usage`` is as the server sent it, unchecked."""

    choices: list[ChatChoice] = []
    model: Any = None
    usage: Any = None
    error: Any = None


_COMPLETION, _CHAT, _RAW = (msgspec.json.Decoder(kind) for kind in (Completion, Chat, msgspec.Raw))


def decoder(chat: bool) -> Callable[[bytes], Any]:
    """Decodes a message of the usual form. Raises msgspec.DecodeError or UnicodeDecodeError for any other."""
    return _CHAT.decode if chat else _COMPLETION.decode


def is_message(line: bytes) -> bool:
    """Whether a line is a whole message: a JSON object, or the end mark; or several without line ends between them."""
    if line.startswith(b"{") and line.rstrip().endswith((b"}", DONE)):
        try:
            _RAW.decode(line)
        except (msgspec.DecodeError, RecursionError):
            return parse_document(line) is not None or bool(joined_messages(line))
        return True
    return line.strip() == DONE


def joined_messages(data: bytes) -> list[bytes]:
    """The messages that stand in one line, with or without the next one's ``data:`` between them; [] if it is none.

    The last entry is what follows the last JSON object.
    """
    text, place, messages = data.decode("utf-8", "replace"), 0, []
    while text.startswith("{", place):
        try:
            _, end = _JSON.raw_decode(text, place)
        except (ValueError, RecursionError):
            break
        messages.append(text[place:end].encode())
        between = _BETWEEN.match(text, end)
        place = between.end() if between else end
    return (
        [*messages, text[place:].encode()] if messages and place < len(text) else messages if len(messages) > 1 else []
    )


def is_keep_alive(data: bytes, kind: bytes = b"") -> bool:
    """Whether an event only shows that the server is alive."""
    return kind.lower() in _KEEP_ALIVE_KINDS or _KEEP_ALIVE.fullmatch(data.strip()) is not None


def parse_document(data: bytes) -> Mapping[str, Any] | None:
    """The JSON object in ``data``, with NaN and bytes that are no UTF-8 accepted; None if it is none."""
    try:
        document = json.loads(data.removeprefix(_BOM).decode("utf-8", "replace"), parse_int=_integer)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _integer(digits: str) -> int | float:
    """A whole number of any length; one beyond every count is a float."""
    return int(digits) if len(digits) < _MOST_DIGITS else float(digits)


def tolerant(document: Mapping[str, Any], chat: bool) -> Completion | Chat:
    """A message from a JSON object of an unusual form; fields of other types than expected are left out."""
    given = document.get("choices")
    choices = [choice for choice in given if isinstance(choice, Mapping)] if isinstance(given, list) else []
    rest = (text_or_none(document.get("model")), document.get("usage"), document.get("error"))
    if chat:
        return Chat([ChatChoice(_delta(choice), *_about(choice)) for choice in choices], *rest)
    return Completion([Choice(text_or_none(choice.get("text")), *_about(choice)) for choice in choices], *rest)


_ELSEWHERE = re.compile(rb'"(?:reasoning|thinking|thought)\w*"\s*:\s*["\[{]')
_TEXTS = ("text", "thinking", "summary", "content")


def thinking_elsewhere(data: bytes) -> str:
    """The thinking in a chat message under no usual name (``thinking``, ``reasoning_text``, ``reasoning_details``)."""
    choices = (parse_document(data) or {}).get("choices") if _ELSEWHERE.search(data) else None
    delta = choices[0].get("delta") if isinstance(choices, list) and choices and isinstance(choices[0], dict) else None
    fields = delta.items() if isinstance(delta, dict) else ()
    return "".join(_texts_in(value) for name, value in fields if name.startswith(("reasoning", "thinking", "thought")))


def _texts_in(value: Any) -> str:
    """The texts in a value: a string, an object with one, or a list of these."""
    if isinstance(value, Mapping):
        return "".join(_texts_in(value[name]) for name in _TEXTS if name in value)
    return "".join(map(_texts_in, value)) if isinstance(value, list) else text_or_none(value) or ""


def _delta(choice: Mapping[str, Any]) -> Delta:
    delta = choice.get("delta")
    if not isinstance(delta, Mapping):
        return Delta()
    content = delta.get("content")
    thinking = _text_of_parts(content, "thinking")
    return Delta(
        text_or_none(delta.get("role")),
        _text_of_parts(content, "text") or text_or_none(content),
        text_or_none(delta.get("reasoning_content")) or thinking,
        text_or_none(delta.get("reasoning")),
        text_or_none(delta.get("refusal")),
        delta.get("tool_calls"),
        delta.get("function_call"),
    )


def _text_of_parts(content: Any, kind: str) -> str | None:
    """The text of the parts of one kind, where content is a list of parts (Mistral)."""
    if not isinstance(content, list):
        return None
    inner = [part.get(kind) for part in content if isinstance(part, Mapping)]
    return "".join(_text_of_parts(part_text, "text") or text_or_none(part_text) or "" for part_text in inner) or None


def _about(choice: Mapping[str, Any]) -> tuple[str | None, Any, Any]:
    return _finish(choice), choice.get("error"), choice.get("usage")


def _finish(choice: Mapping[str, Any]) -> str | None:
    reason = choice.get("finish_reason")
    return text_or_none(reason if isinstance(reason, str) else str(reason)) if reason else None


def text_or_none(value: Any) -> str | None:
    """A string that any file can hold: half a surrogate pair, which JSON can write, is replaced."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else None


def is_finish_reason(reason: str | None) -> bool:
    """Whether a finish reason says why the answer ended; some servers write words for "not finished"."""
    return bool(reason) and reason.strip().lower() not in _NO_REASON  # type: ignore[union-attr]


def may_report_failure(data: bytes) -> bool:
    """Whether the JSON of a message has a field by which :func:`failure_in` judges; quicker than to read it."""
    return _MAY_FAIL.search(data) is not None


def failure_in(document: Mapping[str, Any]) -> bool:
    """Whether a message without choices reports a failure: servers write that in many ways."""
    if any(document.get(name) for name in _FAILURE_FIELDS) or document.get("success") is False:
        return True
    kind, status = document.get("type"), document.get("status")
    if document.get("object") == "error" or (isinstance(kind, str) and kind.rpartition(".")[2] in _FAILED_STATES):
        return True
    if isinstance(status, str) and status.lower() in _FAILED_STATES:
        return True
    codes = (status, document.get("code"), document.get("status_code"))
    return any(int(code) >= 400 for code in map(str, codes) if code.isdigit() and len(code) < _MOST_DIGITS)


def reason_in(error: Any) -> str:
    """What a server says about a failure: its message if there is one, else all of it as text."""
    if isinstance(error, str):
        return text_or_none(error) or ""
    if isinstance(error, list) and len(error) == 1 and not (isinstance(error[0], Mapping) and "loc" in error[0]):
        return reason_in(error[0])  # but FastAPI's, which say where, too
    if isinstance(error, Mapping):
        for name in _REASON_FIELDS:
            if (inner := error.get(name)) and not isinstance(inner, bool | int | float):
                return reason_in(inner)
    return json.dumps(error, default=str)
