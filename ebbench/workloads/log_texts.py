"""Lengths and shared prefixes of the texts in a log; the texts themselves are kept only on request.

A prompt's prefix identities cover blocks of :data:`BLOCK_TOKENS` tokens, taken as four UTF-8 bytes each: two prompts
that begin with the same system prompt have the same first identities. They are numbers in order of appearance, from
which no text can be derived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from ebbench.workloads.tokens import BYTES_PER_TOKEN, TokenCounter, token_counter

BLOCK_TOKENS = 64
_BLOCK_BYTES = BLOCK_TOKENS * BYTES_PER_TOKEN


@dataclass
class TextReader:
    """Counts the tokens of texts by ``tokenizer`` and numbers their prefixes. ``keep``: prompts are kept as text.

    ``counter`` is None until a text had to be counted.
    """

    tokenizer: str | None = None
    keep: bool = False
    counter: TokenCounter | None = None
    _known: dict[tuple[int, bytes], int] = field(default_factory=dict)

    def tokens(self, text: str) -> int:
        """Tokens of a text: counted, or estimated from its bytes."""
        if self.counter is None:
            self.counter = token_counter(self.tokenizer)
        return int(self.counter.count([text])[0])

    def prefix_ids(self, text: str, input_tokens: int) -> list[int]:
        """Identities of the text's first blocks, at most as many as ``input_tokens`` fill."""
        data = text.encode(errors="replace")
        blocks = min(len(data) // _BLOCK_BYTES, input_tokens // BLOCK_TOKENS)
        found, previous = [], -1
        for block in range(blocks):
            digest = blake2b(data[block * _BLOCK_BYTES : (block + 1) * _BLOCK_BYTES], digest_size=8).digest()
            previous = self._known.setdefault((previous, digest), len(self._known))
            found.append(previous)
        return found


def text_of(value: Any) -> str:
    """The text of a prompt: a string, chat messages with roles, or a list of strings; empty for anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return _message(value)
    if isinstance(value, Sequence):
        return "\n".join(filter(None, (text_of(part) for part in value)))
    return ""


def _message(message: Mapping[str, Any]) -> str:
    found, calls = "", _calls(message)
    for key in ("content", "text", "parts", "messages", "prompt", "value"):
        if key in message:
            found = text_of(message[key])
            break
    else:
        if not calls:
            return ""
    text = "\n".join(filter(None, (found, calls)))
    return f"{message['role']}: {text}" if "role" in message else text


def _calls(message: Mapping[str, Any]) -> str:
    """Names and arguments of the tools that a message calls, which are tokens of the model as well."""
    calls = message.get("tool_calls") or [message.get("function_call")]
    if not isinstance(calls, Sequence):
        return ""
    functions = [call.get("function", call) for call in calls if isinstance(call, Mapping)]
    if message.get("type") == "function_call":
        functions.append(message)
    words = [one.get(key) for one in functions if isinstance(one, Mapping) for key in ("name", "arguments")]
    return "\n".join(word for word in words if isinstance(word, str))


def answer_of(value: Any) -> str:
    """The text of a response: a string, a message, or the first choice of a completion; empty for anything else.

    Thinking and tool calls are part of it, as they are of the output tokens.
    """
    if isinstance(value, Mapping):
        if isinstance(choices := value.get("choices"), Sequence) and choices:
            return answer_of(choices[0])
        thinking = value.get("reasoning_content") or value.get("reasoning")
        own = next((value[key] for key in ("message", "body", "content", "text", "output") if value.get(key)), "")
        parts = (thinking if isinstance(thinking, str) else "", answer_of(own), _calls(value))
        return "\n".join(filter(None, parts))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "\n".join(filter(None, map(answer_of, value)))
    return value if isinstance(value, str) else ""
