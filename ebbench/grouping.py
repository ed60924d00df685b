"""Groups values by a key, in the order in which they come; orders what is measured in turn."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


def by_key(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """The values of each key; both in the order in which they first come."""
    groups: dict[Key, list[Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def alternating(items: Sequence[Value], number: int) -> Iterator[Value]:
    """The items of a round: backwards in every second one (ABBA), so that drift of the machine affects all equally."""
    return iter(items) if number % 2 == 0 else reversed(items)
