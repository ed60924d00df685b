"""Checks the numbers that a server reports, once, before they reach typed tables.

A server may send anything where a count belongs: floats, texts, objects, negative or huge numbers. Values that are no
counts are left out and named, so that one odd answer does not cost the run or its other figures.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

LARGEST_COUNT = 2**31 - 1
"""The tables store counts of tokens as int32."""
_KEPT = 64 << 10  # characters of an odd value that are kept until secrets are taken out


class TokenCounts(NamedTuple):
    """The counts in ``usage``, None where the server reported none.

    ``odd``: what the server reported where no count can be, by the name of the field.
    """

    completion: int | None = None
    prompt: int | None = None
    cached: int | None = None
    reasoning: int | None = None
    odd: Mapping[str, str] = {}


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


OPENAI = CountFields()


def token_counts(usage: Any, fields: CountFields = OPENAI) -> TokenCounts:
    """The counts in a response's ``usage``, each checked by itself and against the count that includes it.

    Cached tokens are part of the prompt, reasoning tokens part of the completion. A prompt has at least one token.
    """
    if usage is None:
        return TokenCounts()
    if not isinstance(usage, Mapping):
        return TokenCounts(odd={"usage": shown(usage)})
    odd: dict[str, str] = {}
    completion = _count(usage, fields.completion, odd)
    named = next((name for name in (fields.prompt, *fields.otherwise) if usage.get(name) is not None), fields.prompt)
    prompt = _count(usage, named, odd, at_least=0 if fields.beside else 1)
    if fields.beside and prompt is not None:
        parts = [_count(usage, name, odd) for name in fields.beside]
        prompt = None if odd.keys() & fields.beside else whole_number(prompt + sum(filter(None, parts)), at_least=1)
    cached = _count(usage, fields.cached, odd, whole=prompt)
    reasoning = _count(usage, fields.reasoning, odd, whole=completion)
    return TokenCounts(completion, prompt, cached, reasoning, odd)


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
