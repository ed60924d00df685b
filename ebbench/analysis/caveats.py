"""Caveats of several runs: those of a simulated server, and each said once, with the runs that it holds for."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from ebbench.records.warnings import ABOUT_SERVER, KV_CACHE, RunWarning
from ebbench.spec.server import VIRTUAL_TIME

Owner = Callable[[Collection[int]], str]
"""What stands before a caveat of the runs at these places; "" if it holds for all runs."""

_NUMBER = re.compile(r"(?<![\w.-])\d+(?:,\d{3})*(?:\.\d+)?(?!\w|[.,]\d)")
"""A number, but not one in a name: h100 and h200 are not the ends of a range."""


def of_device(engine: str, warnings: Iterable[RunWarning]) -> tuple[str, ...]:
    """The warnings of a run that are about its device: what it estimates, simplifies or leaves out.

    All warnings of a simulated engine count as its device's (units of another pool, images, a server that would not
    start). Of a real engine those about the server count, such as answers of another model and cached prompts, and not
    those about its client and this one run. What a full KV cache cost counts on both.
    """
    codes = {"device", "engine"} if engine in VIRTUAL_TIME else {"device", *ABOUT_SERVER}
    return tuple(str(warning) for warning in warnings if (warning.about or warning.code) in codes | {KV_CACHE})


def told_once(said: Sequence[Iterable[str]], owner: Owner) -> list[str]:
    """The caveats of runs, each once, preceded by ``owner``'s name for the runs that have it.

    Caveats that differ only in numbers are merged, with the range of each number.
    """
    alike: dict[str, list[tuple[str, int]]] = {}
    for place, texts in enumerate(said):
        for text in texts:
            alike.setdefault(_NUMBER.sub("#", text), []).append((text, place))
    return [owner({place for _, place in told}) + _ranged([text for text, _ in told]) for told in alike.values()]


def by_policy(runs: Sequence[str]) -> Owner:
    """Names the policies of the runs that have a caveat, unless all have; ``runs``: the policy of each run."""

    def owner(places: Collection[int]) -> str:
        names = dict.fromkeys(runs[place] for place in sorted(places))
        return "" if len(names) == len(set(runs)) else f"{', '.join(names)}: "

    return owner


def by_settings(runs: Sequence[Mapping[str, str]], words: Callable[[str, str], str], of: str) -> Owner:
    """Names the settings that the runs with a caveat have and others lack; ``runs``: the settings of each run, by name.

    No more settings are named than it takes, the first ones first. ``words``: a setting's name and values in words.
    ``of``: what is counted where no choice of values has exactly these runs, such as ``cells``.
    """

    def owner(places: Collection[int]) -> str:
        if len(places) == len(runs):
            return ""
        chosen: dict[str, list[str]] = {}
        for name in runs[0]:
            if values := _apart(name, places, runs):
                chosen[name] = values
            having = {place for place, run in enumerate(runs) if all(run[own] in chosen[own] for own in chosen)}
            if having == set(places):
                return f"{', '.join(words(own, ' or '.join(values)) for own, values in chosen.items())}: "
        return f"{len(places)} of {len(runs)} {of}: "

    return owner


def _apart(name: str, places: Collection[int], runs: Sequence[Mapping[str, str]]) -> list[str]:
    """The values of a setting at ``places``, if other runs have others; else none."""
    values = list(dict.fromkeys(runs[place][name] for place in sorted(places)))
    return values if len(values) < len({run[name] for run in runs}) else []


def _ranged(texts: Sequence[str]) -> str:
    """One text for several that differ only in numbers: "44 to 49" for 44, 47 and 49."""
    columns = zip(*(_NUMBER.findall(text) for text in texts), strict=True)
    ends = [sorted(set(column), key=lambda number: float(number.replace(",", ""))) for column in columns]
    numbers = iter(found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}" for found in ends)
    return _NUMBER.sub(lambda _: next(numbers), texts[0])
