"""Stored outcomes of the policy matrix: one JSON file, written after each cell, so that a stopped run continues."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from ebbench.records.files import write_bytes
from tests.benchmarks.policy_cells import OWN, POOLS, Outcome

Outcomes = Mapping[str, Outcome]
"""Outcomes by policy, or by topology where prefill and decode are apart."""


class Results:
    """Outcomes by cell, seed and policy; an empty mapping for a cell whose model does not fit."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._cells: dict[str, dict[int, dict[str, Outcome]]] = {}
        if path.is_file():
            for cell, seeds in json.loads(path.read_text()).items():
                self._cells[cell] = {
                    int(seed): {name: Outcome(**values) for name, values in found.items()}
                    for seed, found in seeds.items()
                }

    def missing(self, cell: str, seed: int, policies: Sequence[str]) -> list[str]:
        """Those of ``policies`` that have not been run."""
        seeds = self._cells.get(cell, {})
        if 0 in seeds and not seeds[0]:
            return []
        return [name for name in policies if name not in seeds.get(seed, {})]

    def add(self, cell: str, seed: int, found: Outcomes) -> None:
        """Add outcomes and write the file."""
        self._cells.setdefault(cell, {}).setdefault(seed, {}).update(found)
        content = {
            name: {
                seed: {policy: _rounded(one) for policy, one in sorted(found.items())} for seed, found in seeds.items()
            }
            for name, seeds in sorted(self._cells.items())
        }
        write_bytes(json.dumps(content, indent=1).encode() + b"\n", self._path)

    def forget(self, policies: Sequence[str]) -> None:
        """Drop the outcomes of these policies, so that they are run again."""
        for seeds in self._cells.values():
            for found in seeds.values():
                for name in policies:
                    found.pop(name, None)

    def cells(self) -> Iterator[tuple[str, Outcomes]]:
        """Cells with their outcomes under the first seed."""
        for name, seeds in self._cells.items():
            if seeds.get(0):
                yield name, seeds[0]

    def seeds(self, cell: str) -> Mapping[int, Outcomes]:
        """Outcomes of a cell by seed."""
        return self._cells[cell]

    def lead(self, cell: str, policy: str, other: str, figure: str = "tokens_per_s") -> tuple[float, float, int]:
        """Mean relative lead of ``policy`` over ``other`` over the seeds that ran both, half its range, and their
        number."""
        leads = [
            getattr(found[policy], figure) / getattr(found[other], figure) - 1.0
            for found in self._cells[cell].values()
            if policy in found and other in found
        ]
        return float(np.mean(leads)), float(np.ptp(leads)) / 2.0, len(leads)


def _rounded(one: Outcome) -> dict[str, float]:
    return {name: float(f"{value:.6g}") for name, value in asdict(one).items()}


def best(found: Outcomes, figure: str, names: Sequence[str]) -> str:
    """The policy with the highest figure among ``names``; of equals the first."""
    return max((name for name in names if name in found), key=lambda name: float(getattr(found[name], figure)))


def rivals(found: Outcomes) -> list[str]:
    """The policies of others in one cell: all but this project's, and no topologies."""
    return [name for name in found if name not in (*OWN, *POOLS)]
