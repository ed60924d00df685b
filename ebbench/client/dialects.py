"""APIs of servers: what is in a request's body, what their messages say, and how they count tokens.

The messages of every API but OpenAI's completions are read into those of its chat endpoint, so that one reader times
them all. The forms are those of the servers' public documentation as of November 2026; a server may leave out any
field, or send another type than documented.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

from ebbench.client.stream_messages import Chat, ChatChoice, Completion, Delta, decoder, text_or_none, tolerant
from ebbench.config.server_url import Endpoint

# The numbers that a server reports are checked once, before they reach typed tables.
#
# A server may send anything where a count belongs: floats, texts, objects, negative or huge numbers. Values that are no
# counts are left out and named, so that one odd answer does not cost the run or its other figures.

LARGEST_COUNT = 2**31 - 1
"""The tables store counts of tokens as int32."""
_KEPT = 64 << 10  # characters of an odd value that are kept until secrets are taken out


class DraftCounts(NamedTuple):
    """Speculative decoding of one answer; None where the server does not say.

    ``steps``: decode steps that verified drafts. ``by_accepted``: of these, how many accepted 0, 1, ... drafts.
    """

    steps: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    by_accepted: tuple[int, ...] | None = None


class TokenCounts(NamedTuple):
    """The counts in ``usage``, None where the server reported none. ``drafts``: see :func:`draft_counts`.

    ``odd``: what the server reported where no count can be, by the name of the field.
    """

    completion: int | None = None
    prompt: int | None = None
    cached: int | None = None
    reasoning: int | None = None
    odd: Mapping[str, str] = {}
    drafts: DraftCounts | None = None


class OddNumber(NamedTuple):
    """A field of ``usage`` that was no number of tokens: in how many answers, and what it was in the first."""

    answers: int
    first: str


def whole_number(value: Any, at_least: int = 0, at_most: int = LARGEST_COUNT) -> int | None:
    """``value`` as an int if it is a whole number (also 4.0) from ``at_least`` to ``at_most``, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float) and not value.is_integer():  # also NaN and infinity
        return None
    return int(value) if at_least <= value <= at_most else None


def finite_number(value: Any) -> float | None:
    """``value`` as a finite float, else None."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def shown(value: Any) -> str:
    """An odd value as a server sent it, on one line of printable ASCII."""
    return json.dumps(value, default=str)[:_KEPT]


class CountFields(NamedTuple):
    """The fields of a server's usage; a dot leads into the details of a field, "" stands for no such number.

    ``beside``: prompt tokens that are counted apart from ``prompt``. ``otherwise``: fields of which the first one that
    is there has the prompt's tokens where ``prompt`` is missing.
    """

    completion: str = "completion_tokens"
    prompt: str = "prompt_tokens"
    cached: str = "prompt_tokens_details.cached_tokens"
    reasoning: str = "completion_tokens_details.reasoning_tokens"
    beside: tuple[str, ...] = ()
    otherwise: tuple[str, ...] = ()

    @property
    def completions(self) -> tuple[str, ...]:
        """The fields that may have the output tokens: gateways pass on those of another API."""
        return (self.completion, "completion_tokens", "output_tokens") if self.completion else ("",)

    @property
    def prompts(self) -> tuple[str, ...]:
        """The fields that may have the prompt's tokens."""
        return (self.prompt, *self.otherwise, "prompt_tokens", "input_tokens")


OPENAI, _TOTAL = CountFields(), "total_tokens"


def token_counts(usage: Any, fields: CountFields = OPENAI) -> TokenCounts:
    """The counts in a response's ``usage``, each checked by itself and against the count that includes it.

    Cached tokens are part of the prompt, reasoning tokens part of the completion. A prompt has at least one token.
    """
    if usage is None:
        return TokenCounts()
    if not isinstance(usage, Mapping):
        return TokenCounts(odd={"usage": shown(usage)})
    odd: dict[str, str] = {}
    completion = _count(usage, _named(usage, fields.completions), odd)
    prompt = _count(usage, _named(usage, fields.prompts), odd, at_least=0 if fields.beside else 1)
    if fields.beside and prompt is not None:
        parts = [_count(usage, name, odd) for name in fields.beside]
        prompt = None if odd.keys() & fields.beside else whole_number(prompt + sum(filter(None, parts)), at_least=1)
    cached = _count(usage, fields.cached, odd, whole=prompt)
    reasoning = _count(usage, fields.reasoning, odd, whole=completion)
    total = whole_number(usage.get(_TOTAL))
    if total and completion is not None and prompt is not None and total != prompt + completion:
        odd[_TOTAL] = f"{total} where {prompt} and {completion} are counted"  # thinking that only the total has
    return TokenCounts(completion, prompt, cached, reasoning, odd)


def _named(usage: Mapping[str, Any], names: Sequence[str]) -> str:
    """The first of the names of a field under which there is a value, else the first one."""
    return next((name for name in names if usage.get(name) is not None), names[0])


def _details(usage: Mapping[str, Any], name: str, odd: dict[str, str]) -> Mapping[str, Any]:
    details = usage.get(name)
    if isinstance(details, Mapping):
        return details
    if details:  # some servers write "no details" as an empty list
        odd[name] = shown(details)
    return {}


def _count(
    usage: Mapping[str, Any], path: str, odd: dict[str, str], at_least: int = 0, whole: int | None = None
) -> int | None:
    outer, _, name = path.rpartition(".")
    value = (_details(usage, outer, odd) if outer else usage).get(name)
    if value is None:
        return None
    count = whole_number(value, at_least)
    if count is None:
        odd[name] = shown(value)
    elif whole is not None and count > whole:
        odd[name] = f"{count} of {whole}"
        return None
    return count


# What servers say of the drafts of an answer, in the messages that end it.


class _DraftFields(NamedTuple):
    """Names of a server's counts, of each the ones that its versions have had."""

    steps: tuple[str, ...] = ()
    drafted: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()
    by_accepted: tuple[str, ...] = ()
    rejected: tuple[str, ...] = ()


_DRAFT_FIELDS = (
    _DraftFields(  # vLLM 0.32 with --per-request-spec-decode-metrics
        ("num_spec_steps",), ("num_draft_tokens",), ("num_accepted_draft_tokens",), ("acceptance_histogram",)
    ),
    _DraftFields(  # SGLang
        ("spec_verify_ct",),
        ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num"),
        ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num"),
        ("spec_correct_drafts_histogram", "spec_accept_histogram"),
    ),
    _DraftFields(drafted=("draft_n",), accepted=("draft_n_accepted",)),  # llama.cpp
    _DraftFields(accepted=("accepted_prediction_tokens",), rejected=("rejected_prediction_tokens",)),  # OpenAI
)
_TOKENS_PER_STEP = "avg_decoded_tokens_per_iter"
"""TensorRT-LLM's: output tokens per step."""
_DEEPEST = 5  # below a list of messages: `choices`, one of them, its `meta_info`
MOST_DRAFTS = 256
"""Longer histograms are no counts of accepted drafts."""


def draft_counts(messages: Sequence[Any], completion: int | None, odd: dict[str, str]) -> DraftCounts | None:
    """What a server says in its ``messages`` of the drafts of an answer of ``completion`` tokens; None if nothing.

    Odd values are added to ``odd``.
    """
    for counts in _objects(messages):
        for names in _DRAFT_FIELDS:
            if (drafts := _drafts(counts, names, completion, odd)) is not None:
                return drafts
        per_step = finite_number(counts.get(_TOKENS_PER_STEP))
        if per_step is not None and per_step >= 1.0 and completion:
            steps = round(completion / per_step)
            return DraftCounts(steps, None, completion - steps)
    return None


def _objects(document: Any, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """All objects in a document: where servers put these counts differs by server, endpoint and version."""
    if isinstance(document, Mapping):
        yield document
    if depth < _DEEPEST:
        parts = document.values() if isinstance(document, Mapping) else document if isinstance(document, list) else ()
        for part in parts:
            yield from _objects(part, depth + 1)


def _drafts(
    counts: Mapping[str, Any], names: _DraftFields, completion: int | None, odd: dict[str, str]
) -> DraftCounts | None:
    def count(field: tuple[str, ...]) -> int | None:
        name = next((name for name in field if counts.get(name) is not None), None)
        return None if name is None else _count(counts, name, odd)

    steps, drafted, accepted, rejected = map(count, (names.steps, names.drafted, names.accepted, names.rejected))
    by_accepted = _histogram(counts, names.by_accepted, odd)
    if by_accepted is not None:
        steps, accepted = sum(by_accepted), sum(place * steps for place, steps in enumerate(by_accepted))
    elif accepted is None and steps and completion:  # a first token, and one per step beside the accepted ones
        accepted = max(completion - 1 - steps, 0)
    if drafted is None and rejected is not None and accepted is not None:
        drafted = rejected + accepted
    if accepted is None:
        return None
    if drafted is not None and accepted > drafted:
        odd[names.accepted[0]] = f"{accepted} of {drafted}"
        return None
    return DraftCounts(steps, drafted, accepted, by_accepted)


def _histogram(counts: Mapping[str, Any], field: tuple[str, ...], odd: dict[str, str]) -> tuple[int, ...] | None:
    name = next((name for name in field if counts.get(name) is not None), "")
    if not name:
        return None
    values = counts[name]
    numbers = tuple(map(whole_number, values)) if isinstance(values, list) and len(values) <= MOST_DRAFTS else (None,)
    if None in numbers or sum(filter(None, numbers)) > LARGEST_COUNT:
        odd[name] = shown(values)
        return None
    return tuple(filter(lambda number: number is not None, numbers)) or None  # type: ignore[arg-type]


# Messages and bodies of each API.

Reader = Callable[[Mapping[str, Any]], Completion | Chat | None]
"""Reads one message; None for one that carries nothing. Made anew for each response: a reader may keep a state."""
EVENTS = frozenset({"text/event-stream"})
LINES = EVENTS | {"application/x-ndjson", "application/ndjson", "application/jsonl", "application/json"}
DOCUMENT = frozenset({"application/json"})
_UNTOLD = frozenset({"", "text/plain", "application/octet-stream"})
_EVENT_NAME = re.compile(rb"[\w.]+")


class Translated(Chat):
    """A message of another API as one of the chat endpoint.

    ``finish_reason``: why the answer ended, beside any choice. ``done``: no further message follows.
    """

    finish_reason: str | None = None
    done: bool = False


@dataclass(frozen=True)
class Dialect:
    """One endpoint.

    ``prompt``: the field of the prompt, and what it holds (``holds``). ``limit``, ``temperature``, ``ignore_eos``: the
    fields of these settings, with a dot for a field of a field; None where the API has none. ``fixed``: what every body
    holds. ``named``: whether the body names the model. ``reader``: makes the reader of one response. ``counts``: where
    ``usage`` has which number. ``content_types``: those of an answer. ``named_events``: a message may have its type in
    the line of its event alone. ``whole``: an answer is one document without
    output tokens, not a stream. ``ends_with_body``: the end of the stream is the only sign that an answer is complete.
    ``typed``: decodes usual messages at once; without it they are decoded as objects and given to the reader.
    ``priority``: whether a request may have one.
    """

    prompt: str
    holds: Literal["ids", "words", "messages", "documents"]
    reader: Callable[[], Reader]
    limit: str | None = "max_tokens"
    temperature: str | None = "temperature"
    ignore_eos: str | None = "ignore_eos"
    fixed: Mapping[str, Any] = field(default_factory=lambda: {"stream": True})
    named: bool = True
    counts: CountFields = CountFields()  # noqa: RUF009 - a constant
    content_types: frozenset[str] = EVENTS
    named_events: bool = False
    whole: bool = False
    ends_with_body: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    typed: Callable[[bytes], Completion | Chat] | None = None
    priority: bool = True

    @property
    def thinks(self) -> bool:
        """Whether answers of this endpoint can mark a part as thinking."""
        return self.holds == "messages"

    def decoder(self, reader: Reader) -> Callable[[bytes], Completion | Chat | None]:
        """Decodes a message of the usual form. Raises msgspec.DecodeError or UnicodeDecodeError for any other."""
        return self.typed or (lambda data: reader(_OBJECT.decode(data)))

    def takes(self, content_type: str) -> bool:
        """Whether a content type is that of an answer, whatever its case and parameters, or says nothing."""
        return _media_type(content_type) in self.content_types or self.says_nothing(content_type)

    def says_nothing(self, content_type: str) -> bool:
        """Whether a content type leaves open if a stream follows: OpenAI's clients read the events all the same."""
        return not self.whole and _media_type(content_type) in _UNTOLD

    def typed_message(self, data: bytes, event: bytes) -> bytes:
        """A message with the type that the line of its event names; one of its own, which follows, takes its place."""
        if not (self.named_events and _EVENT_NAME.fullmatch(event) and data.startswith(b'{"')):
            return data
        return b'{"type":"%b",%b' % (event, data[1:])


_OBJECT = msgspec.json.Decoder(dict[str, Any])


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _inner(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _answer_part(text: Any = None, thinking: Any = None, called: Any = None, **more: Any) -> Translated:
    delta = Delta(content=text_or_none(text), reasoning=text_or_none(thinking), tool_calls=called)
    return Translated([ChatChoice(delta)], **more)


# OpenAI's Responses. Events have a type; the parts of the answer are deltas, the last event has the usage.

_TEXTS = frozenset({"response.output_text.delta", "response.refusal.delta"})
_THOUGHTS = frozenset(
    {"response.reasoning_text.delta", "response.reasoning_summary_text.delta", "response.reasoning.delta"}
)
_ENDS = frozenset({"response.completed", "response.incomplete", "response.cancelled", "response.done"})
_FAILURES = frozenset({"error", "response.failed", "response.error"})


def _responses(event: Mapping[str, Any]) -> Translated | None:
    kind = text_or_none(event.get("type")) or ""
    if kind in _TEXTS:
        return _answer_part(event.get("delta"))
    if kind in _THOUGHTS:
        return _answer_part(thinking=event.get("delta"))
    if kind.endswith(".delta"):  # arguments of a call of a function, a tool, a program
        return _answer_part(called=event.get("delta")) if event.get("delta") else None
    response = _inner(event.get("response"))
    if kind in _ENDS:
        why = text_or_none(_inner(response.get("incomplete_details")).get("reason"))
        state = why or text_or_none(response.get("status")) or kind.rpartition(".")[2]
        return Translated(
            [], text_or_none(response.get("model")), response.get("usage"), finish_reason=state, done=True
        )
    if kind == "response.created":
        return Translated([], text_or_none(response.get("model")))
    known = kind.startswith("response.") and kind not in _FAILURES
    return None if known else Translated()


# Anthropic's Messages. Prompt tokens that were cached are counted beside the others.


def _messages(event: Mapping[str, Any]) -> Translated | None:
    kind = text_or_none(event.get("type"))
    if kind == "content_block_delta":
        delta = _inner(event.get("delta"))
        part, called = _answer_part(delta.get("text"), delta.get("thinking")), delta.get("partial_json")
        if called:
            return _answer_part(called=called)
        return part if text_or_none(delta.get("text")) or text_or_none(delta.get("thinking")) else None
    if kind == "content_block_start":
        block = _inner(event.get("content_block"))
        if (text_or_none(block.get("type")) or "").endswith("tool_use"):
            return _answer_part(called=block.get("name"))
        written = block.get("text") or block.get("thinking")
        return _answer_part(block.get("text"), block.get("thinking")) if written else None
    if kind == "message_start":
        message = _inner(event.get("message"))
        usage = message.get("usage")
        if isinstance(usage, Mapping):  # its output tokens are those of the start
            usage = {name: value for name, value in usage.items() if name != "output_tokens"}
        return Translated([], text_or_none(message.get("model")), usage)
    if kind == "message_delta":
        reason = text_or_none(_inner(event.get("delta")).get("stop_reason"))
        return Translated([], usage=event.get("usage"), finish_reason=reason)
    if kind == "message_stop":
        return Translated(done=True, finish_reason=None)
    return None if kind in ("content_block_stop", "ping") else Translated()


# APIs of single servers.


class _Sglang:
    """SGLang's /generate: each message holds the text so far, unless the server sends only what is new."""

    def __init__(self) -> None:
        self._text = ""

    def __call__(self, message: Mapping[str, Any]) -> Translated | None:
        meta = _inner(message.get("meta_info"))
        reason = meta.get("finish_reason")
        why = text_or_none(_inner(reason).get("type")) or text_or_none(reason)
        if "text" not in message and "output_ids" not in message:
            return Translated([], None, meta or None, message.get("error"), why)
        text = text_or_none(message.get("text")) or ""
        new = text[len(self._text) :] if text.startswith(self._text) else text
        self._text = text
        return _answer_part(new, usage=meta or None, error=message.get("error"), finish_reason=why)


def _llama_cpp(message: Mapping[str, Any]) -> Translated | None:
    """llama.cpp's /completion: ``stop`` marks the last message, which has the counts."""
    if "content" not in message:
        return Translated(error=message.get("error"))
    last = message.get("stop") is True
    why = text_or_none(message.get("stop_type")) or ("stop" if last else None)
    more: dict[str, Any] = {"usage": message, "finish_reason": why, "done": True} if last else {}
    model = text_or_none(message.get("model")) if last else None
    return (
        Translated([], model, **more)
        if last and not message["content"]
        else _answer_part(message["content"], model=model, **more)
    )


def _tgi(message: Mapping[str, Any]) -> Translated | None:
    """Text Generation Inference's /generate_stream: one token per message, ``details`` in the last one."""
    details = _inner(message.get("details"))
    more: dict[str, Any] = {
        "usage": details or None,
        "finish_reason": text_or_none(details.get("finish_reason")),
        "done": bool(details),
    }
    if not isinstance(message.get("token"), Mapping):
        return Translated(error=message.get("error"), **more)
    return _answer_part(message["token"].get("text"), **more)


def _ollama(message: Mapping[str, Any]) -> Translated | None:
    """Ollama's /api/chat: lines of JSON; the last one is marked ``done`` and has the counts."""
    answer, last = _inner(message.get("message")), message.get("done") is True
    more: dict[str, Any] = {"error": message.get("error")}
    if last:
        more |= {"usage": message, "finish_reason": text_or_none(message.get("done_reason")) or "stop", "done": True}
    written = answer.get("content") or answer.get("thinking") or answer.get("tool_calls")
    if not written and (last or not answer):
        return Translated([], text_or_none(message.get("model")), **more)
    called = answer.get("tool_calls")
    return _answer_part(
        answer.get("content"), answer.get("thinking"), called, model=text_or_none(message.get("model")), **more
    )


def _triton(message: Mapping[str, Any]) -> Translated | None:
    """Triton's generate_stream with TensorRT-LLM: ``text_output``, no counts and no reason for the end."""
    if "text_output" not in message:
        return Translated(error=message.get("error"))
    parts = message["text_output"]
    text = "".join(map(str, parts)) if isinstance(parts, list) else parts
    return _answer_part(text, model=text_or_none(message.get("model_name")))


# Answers without output tokens.


def _documents(document: Mapping[str, Any]) -> Translated | None:
    """The answer of embeddings or rerank: a list of vectors or scores."""
    results = next((document[name] for name in ("data", "results", "embeddings") if document.get(name)), None)
    usage = document.get("usage") or _inner(document.get("meta")).get("tokens")
    complete = isinstance(results, list) and not any(map(_is_empty, results))
    return Translated(
        [],
        text_or_none(document.get("model")),
        usage,
        document.get("error"),
        "stop" if complete else None,
        done=complete,
    )


def _is_empty(result: Any) -> bool:
    """Whether a result has neither a vector nor a score, although it has a field for one."""
    values = [result[name] for name in _RESULTS if name in result] if isinstance(result, Mapping) else [result]
    return bool(values) and all(value is None or value in ([], "") for value in values)


_RESULTS = ("embedding", "relevance_score", "score")
_STREAM: dict[str, Any] = {"stream": True}
_USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
_OF_INPUT = CountFields("output_tokens", "input_tokens", "input_tokens_details.cached_tokens",
                        "output_tokens_details.reasoning_tokens")  # fmt: skip
_OF_TOTAL = CountFields("", "prompt_tokens", otherwise=("total_tokens", "input_tokens"))

DIALECTS: Mapping[Endpoint, Dialect] = {
    "completions": Dialect("prompt", "ids", lambda: lambda message: tolerant(message, chat=False), fixed=_USAGE,
                           typed=decoder(chat=False)),
    "chat": Dialect(
        "messages", "messages", lambda: lambda message: tolerant(message, chat=True), "max_completion_tokens",
        fixed=_USAGE, typed=decoder(chat=True),
    ),
    "responses": Dialect(
        "input", "messages", lambda: _responses, "max_output_tokens", fixed=_STREAM | {"store": False},
        counts=_OF_INPUT, named_events=True,
    ),
    "messages": Dialect(
        "messages", "messages", lambda: _messages,
        counts=CountFields("output_tokens", "input_tokens", "cache_read_input_tokens",
                           "output_tokens_details.thinking_tokens",
                           beside=("cache_read_input_tokens", "cache_creation_input_tokens")),
        headers={"anthropic-version": "2023-06-01"}, named_events=True, priority=False,
    ),
    "embeddings": Dialect(
        "input", "ids", lambda: _documents, None, None, None, {}, counts=_OF_TOTAL, content_types=DOCUMENT, whole=True
    ),
    "rerank": Dialect(
        "documents", "documents", lambda: _documents, None, None, None, {}, counts=_OF_TOTAL, content_types=DOCUMENT,
        whole=True,
    ),
    "sglang": Dialect(
        "input_ids", "ids", _Sglang, "sampling_params.max_new_tokens", "sampling_params.temperature",
        "sampling_params.ignore_eos", named=False,
        counts=CountFields("completion_tokens", "prompt_tokens", "cached_tokens", "reasoning_tokens"),
    ),
    "llama.cpp": Dialect(
        "prompt", "ids", lambda: _llama_cpp, "n_predict", named=False,
        counts=CountFields("tokens_predicted", "tokens_evaluated", "timings.cache_n"), priority=False,
    ),
    "tgi": Dialect(
        "inputs", "words", lambda: _tgi, "parameters.max_new_tokens", None, None,
        _STREAM | {"parameters": {"details": True, "do_sample": False}}, named=False,
        counts=CountFields("generated_tokens", "input_length"), priority=False,
    ),
    "ollama": Dialect(
        "messages", "messages", lambda: _ollama, "options.num_predict", "options.temperature", None,
        counts=CountFields("eval_count", "prompt_eval_count"), content_types=LINES,
        priority=False,
    ),
    "triton": Dialect(
        "text_input", "words", lambda: _triton, ignore_eos=None, named=False, ends_with_body=True, priority=False
    ),
}  # fmt: skip
"""The endpoints by the names of ``--endpoint``."""
