"""Estimates a request's length and prefix for the dispatcher, without a tokenizer."""

from __future__ import annotations

from typing import Any

import msgspec

from ebbench.dispatch.base import DispatchRequest
from ebbench.records.content import CHUNK_TOKENS

BYTES_PER_TOKEN = 4.0
"""Of English text. The servers count exactly; the dispatcher only compares requests with each other."""


_MOST_BYTES = 1 << 23
_MOST_BLOCKS = 2048  # of a prefix: 2**20 tokens; more would stop the event loop for seconds
_MOST_TOKENS = 1 << 24  # no model answers with more; a larger number would decide where every other request goes


class _Body(msgspec.Struct):
    prompt: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


_DECODER = msgspec.json.Decoder(_Body)


def dispatch_request(key: int, body: bytes, *, prefix: bool) -> DispatchRequest:
    """The request's estimated tokens and, with ``prefix``, its block hashes.

    A body that is not a JSON object counts as one token; the server will refuse it. A body above 8 MiB is not read, as
    that would stop all streams for up to seconds; its bytes are counted.
    """
    if len(body) > _MOST_BYTES:
        tokens = round(len(body) / BYTES_PER_TOKEN)
        return DispatchRequest(key, tokens, tokens)
    try:
        found = _DECODER.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return DispatchRequest(key, 1, 1)
    raw = bytes(found.prompt) or bytes(found.messages)
    tokens = _tokens(raw)
    output_tokens = min(max(found.max_completion_tokens or found.max_tokens or 0, 0), _MOST_TOKENS)
    return DispatchRequest(key, tokens, tokens + output_tokens, _blocks(raw, tokens) if prefix else ())


def _tokens(raw: bytes) -> int:
    if _is_ids(raw):
        return raw.count(b",") + 1
    return max(1, round(len(raw) / BYTES_PER_TOKEN))


def _is_ids(raw: bytes) -> bool:
    """Whether the prompt is a list of token ids instead of text or messages."""
    return raw[:1] == b"[" and raw[1:2].isdigit()


def _blocks(raw: bytes, tokens: int) -> tuple[int, ...]:
    """Hashes of the leading blocks of about CHUNK_TOKENS tokens; each hash covers all text before it."""
    pieces: list[Any]
    if _is_ids(raw):
        most = min(tokens, _MOST_BLOCKS * CHUNK_TOKENS)
        ids = raw[1:-1].split(b",", most)
        pieces = [b",".join(ids[i : i + CHUNK_TOKENS]) for i in range(0, most - CHUNK_TOKENS + 1, CHUNK_TOKENS)]
    else:
        size = round(CHUNK_TOKENS * BYTES_PER_TOKEN)
        most = min(len(raw), _MOST_BLOCKS * size)
        pieces = [raw[i : i + size] for i in range(0, most - size + 1, size)]
    hashes: list[int] = []
    before = 0
    for piece in pieces:
        before = hash((before, piece))
        hashes.append(before)
    return tuple(hashes)
