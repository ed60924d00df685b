"""aiconfigurator-core asked at run time against the packaged tables: errors of both against measured servers.

``python -m tests.benchmarks.bench_library [--every 6] [--group silicon]``: cases of the fidelity report, every so many
of each group, once as they are and once with all products, attention, experts and collectives from the library.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import pyarrow as pa

from ebbench.devices import costs, layers
from ebbench.papers.fidelity.case import Case
from ebbench.papers.fidelity.cases import all_cases
from ebbench.papers.fidelity.runs import run_cases
from ebbench.runs import prepare

GROUPS = ("silicon", "servers", "table 3", "table 13")
Errors = dict[tuple[str, str, str], list[float]]


def main() -> None:
    """Command-line entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--group", action="append", choices=GROUPS)
    args = parser.parse_args()
    cases = [case for group in args.group or GROUPS for case in _of(group)[:: args.every]]
    print("| group | device | figure | cells | tables: median error | library | tables: signed | library |")
    print("|---|---|---|---|---|---|---|---|")
    start = perf_counter()
    ours = errors(cases)
    middle = perf_counter()
    with from_library():
        theirs = errors(cases)
    for key in sorted(ours):
        pair = [ours[key], theirs.get(key, [])]
        sizes = [f"{median(map(abs, each)):.1%}" if each else "refused" for each in pair]
        signed = [f"{median(each):+.1%}" if each else "" for each in pair]
        print("|", " | ".join([*key, str(len(ours[key])), *sizes, *signed]), "|")
    print(f"\nSeconds: tables {middle - start:.0f}, library {perf_counter() - middle:.0f}.")


def errors(cases: Iterable[Case]) -> Errors:
    """Relative errors by group, device and figure."""
    found: Errors = {}
    for case in cases:
        for cell in run_cases([case], 0, lambda _: None):
            if cell.scored and not cell.failed:
                found.setdefault((case.group, case.device, cell.metric), []).append(cell.error)
    return found


def from_library() -> Any:
    """Devices are loaded without the packaged tables of products, attention, experts and collectives."""
    nothing = pa.table({"bytes": [], "tokens": [], "time_us": []})
    replaced = patch.multiple(
        layers, _gemm_tables=_none, _gemm_from_layers=_none, _measured=_none, shapes_measured=lambda *_: []
    )
    stack = patch.multiple(costs, surfaces=_none, has_joint_tables=lambda _: False)
    joined = patch.object(layers, "select", lambda *_, **__: nothing)
    return _All((replaced, stack, joined))


class _All:
    """Several patches as one context."""

    def __init__(self, patches: tuple[Any, ...]) -> None:
        self.patches = patches

    def __enter__(self) -> None:
        prepare._loaded.clear()  # devices made of the packaged tables
        for one in self.patches:
            one.start()

    def __exit__(self, *_: object) -> None:
        for one in self.patches:
            one.stop()


def _none(*_: object, **__: object) -> None:
    return None


def _of(group: str) -> list[Case]:
    return [case for case in all_cases() if case.group == group]


if __name__ == "__main__":
    main()
