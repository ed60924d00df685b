"""Request bodies: prompts as token ids or text; later turns of a session carry its history."""

from __future__ import annotations

import base64
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ebbench.client.dialects import DIALECTS
from ebbench.records import CHUNK_TOKENS
from ebbench.records.plan import token_ids
from ebbench.spec.client import ClientOptions

# JSON of synthetic prompts, written from tables of bytes.
#
# A list of 50,000 numbers takes msgspec several milliseconds with the interpreter locked, in which no response can be
# timed. Here every token id or word is one fixed-width cell of a table, so that numpy copies whole prompts.

_FILLER = b"\0"


class PromptTable:
    """The JSON text of each token of a vocabulary, in cells of equal width."""

    def __init__(self, cells: npt.NDArray[np.bytes_], *, text: bool) -> None:
        """``cells``: what stands for each token; ``text``: a JSON string of them, otherwise a JSON array."""
        self._cells = cells
        self._text = text

    @staticmethod
    def of_ids(vocab: int) -> PromptTable:
        """Token ids below ``vocab``."""
        width, numbers = len(str(vocab - 1)), np.arange(vocab, dtype=np.uint32)
        cells = np.full((vocab, width + 1), ord(","), np.uint8)
        for place in range(width):
            leading = numbers // 10**place  # the number up to this digit; 0 where it has no such digit
            cells[:, width - 1 - place] = np.where((leading > 0) | (place == 0), leading % 10 + ord("0"), ord(_FILLER))
        return PromptTable(cells.view(f"S{width + 1}").ravel(), text=False)

    @staticmethod
    def of_words(words: Sequence[str]) -> PromptTable:
        """Words that need no escape in JSON, one per token."""
        return PromptTable(np.array([f"{word} ".encode() for word in words]), text=True)

    def json(self, tokens: npt.NDArray[np.int32]) -> msgspec.Raw:
        """The prompt of these tokens: the JSON array of their ids, or the string of their words."""
        joined = self._cells.take(tokens).tobytes().translate(None, _FILLER)[:-1]
        return msgspec.Raw(b'"%b"' % joined if self._text else b"[%b]" % joined)


# Synthetic images: small PNG files whose pixels differ, so that no server takes one for another.

_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def png(content: int, number: int, side: int) -> bytes:
    """A PNG of ``side`` x ``side`` RGB pixels, a function of the content stream and the image's number in it.

    The first line is random, the rest is black: the pixels are unlike those of other images, and the file is small.
    """
    generator = np.random.default_rng([content & ((1 << 64) - 1), number])
    lines = np.zeros((side, 1 + 3 * side), np.uint8)  # each line begins with its filter type, 0
    lines[0, 1:] = generator.integers(0, 256, 3 * side)
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 1)), (b"IEND", b""))
    return _SIGNATURE + b"".join(_chunk(kind, data) for kind, data in parts)


def image_url(content: int, number: int, side: int) -> str:
    """The image as the ``data:`` URL of a chat message."""
    return f"data:image/png;base64,{base64.b64encode(png(content, number, side)).decode()}"


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


# Short common words, one token each in the usual vocabularies. Where an API takes no token ids, a synthetic prompt has
# about the planned length; the run records the server's count.
_WORDS = re.findall(
    r"\w+",
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head "
    "house service friend father power hour game line end member law car city community name",
)


class Turn(msgspec.Struct, frozen=True, gc=False):
    """The fields of one planned request that its body depends on; meanings as in the PLAN schema."""

    row: int
    request_id: str
    turn: int
    input_tokens: int
    output_tokens: int
    content: int
    hash_ids: Sequence[int] | None
    prompt: str | None
    block_tokens: int = CHUNK_TOKENS
    lora: str | None = None
    image_tokens: Sequence[int] = ()
    image_side: int = 0
    priority: int | None = None


def _with(body: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """``body`` with a field set; ``path`` leads through fields of fields with dots."""
    outer, _, inner = path.partition(".")
    return {**body, outer: _with(body.get(outer) or {}, inner, value) if inner else value}


class RequestBodies:
    """Builds request bodies for one model and one set of options."""

    def __init__(self, model: str, options: ClientOptions) -> None:
        self._dialect = DIALECTS[options.endpoint]
        self._vocab = options.vocab_size
        self._documents = options.documents
        fixed: dict[str, Any] = {**({"model": model} if self._dialect.named else {}), **self._dialect.fixed}
        if options.temperature is not None and self._dialect.temperature is not None:
            fixed = _with(fixed, self._dialect.temperature, options.temperature)
        if options.ignore_eos and self._dialect.ignore_eos is not None:
            fixed = _with(fixed, self._dialect.ignore_eos, True)
        fixed |= options.extra_body
        self._fixed = {name: value for name, value in fixed.items() if value is not None}
        self._limit = self._dialect.limit and (options.max_tokens_field or self._dialect.limit)
        ids = self._dialect.holds == "ids"
        self._table = PromptTable.of_ids(options.vocab_size) if ids else PromptTable.of_words(_WORDS)

    def build(self, turn: Turn, history: Sequence[tuple[str, str]] = (), *, may_hang_up: bool = False) -> bytes:
        """The request body as JSON. ``history`` holds the earlier (question, answer) texts of the session.

        ``may_hang_up``: ask for the token count with every message, since the last one may not be read.
        """
        whole = self._fixed | self._asked(turn, history)
        if self._limit is not None:
            whole = _with(whole, self._limit, turn.output_tokens)
        if turn.lora is not None:
            whole["model"] = turn.lora
        if turn.priority is not None:
            whole["priority"] = turn.priority
        if may_hang_up and isinstance(whole.get("stream_options"), dict):
            whole["stream_options"] = {**whole["stream_options"], "continuous_usage_stats": True}
        return msgspec.json.encode(whole)

    def _asked(self, turn: Turn, history: Sequence[tuple[str, str]]) -> dict[str, Any]:
        field = self._dialect.prompt
        if self._dialect.holds == "messages":
            earlier = [
                message
                for question, answer in history
                for message in (_message("user", question), _message("assistant", answer))
            ]
            return {field: [*earlier, self._question(turn)]}
        if self._dialect.holds == "documents":
            return self._ranking(turn)
        if turn.prompt is not None and field == "input_ids":
            field = "text"  # SGLang's field of a text
        return {field: self._prompt(turn, history)}

    def _ranking(self, turn: Turn) -> dict[str, Any]:
        """A query and documents: the prompt's words in equal parts; fewer documents where some would be empty."""
        text = turn.prompt if turn.prompt is not None else msgspec.json.decode(self._text(turn))
        words = str(text).split() or [""]
        if len(words) == 1:
            return {"query": words[0], self._dialect.prompt: words}
        parts = min(1 + self._documents, len(words))
        ends = np.linspace(0, len(words), parts + 1).astype(int).tolist()
        query, *documents = (" ".join(words[begin:end]) for begin, end in pairwise(ends))
        return {"query": query, self._dialect.prompt: documents}

    def _prompt(self, turn: Turn, history: Sequence[tuple[str, str]]) -> str | msgspec.Raw:
        if turn.prompt is None:
            return self._synthetic(turn, self._vocab if self._dialect.holds == "ids" else len(_WORDS))
        return "".join(part for pair in history for part in pair) + turn.prompt

    def _question(self, turn: Turn) -> dict[str, Any]:
        """The user's message: its text, after the images if there are some."""
        if not turn.image_tokens:
            return _message("user", self._text(turn))
        sent = enumerate(turn.image_tokens)
        urls = [image_url(turn.content, number, turn.image_side) for number, _ in sent]
        images: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        return {"role": "user", "content": [*images, {"type": "text", "text": self._text(turn)}]}

    def _text(self, turn: Turn) -> str | msgspec.Raw:
        return turn.prompt if turn.prompt is not None else self._synthetic(turn, len(_WORDS))

    def _synthetic(self, turn: Turn, vocab: int) -> msgspec.Raw:
        """The JSON of a synthetic prompt: token ids, or words where the API takes texts only."""
        text_tokens = turn.input_tokens - sum(turn.image_tokens)
        return self._table.json(token_ids(turn.content, turn.hash_ids, 0, text_tokens, vocab, turn.block_tokens))


def _message(role: str, content: str | msgspec.Raw) -> dict[str, str | msgspec.Raw]:
    return {"role": role, "content": content}
