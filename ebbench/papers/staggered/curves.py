"""Prefill pools of the staggered paper over the load: the runs, and interpolation between them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ebbench.papers.staggered.deployment import MODEL, UNIT, deployed, pass_s
from ebbench.papers.table import PaperOptions
from ebbench.runs.store import RunStore
from ebbench.spec.run import RunSpec, simulated

STAGGERED_PAPER = "Tian et al., Staggered Batch Scheduling, 2025"
REQUESTS = 12_000
NETWORK_MS = 0.5
AS_PUBLISHED = "sbs:bypass=off,sizing=off,overdraw=on,aged_cycles=off,lookahead=0"
"""Algorithms 1 and 2 to the letter: no bypass under light load, chunks may be exceeded, longest first in all cases, and
nothing is sent to an instance before the end of its pass is known."""
WITH_LOOKAHEAD = AS_PUBLISHED.replace(",lookahead=0", "")
"""The same with our extension ``lookahead``: until November 2026 this stood here as the published algorithms."""
IMMEDIATE = ("round-robin", "least-outstanding")
DISPATCH = (*IMMEDIATE, AS_PUBLISHED, WITH_LOOKAHEAD, "sbs")
TITLES = {AS_PUBLISHED: "sbs, to the letter", WITH_LOOKAHEAD: "with lookahead (ours)", "sbs": "sbs (ours)"}
"""Short names of the staggered policies in tables."""
SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.975, 1.0)
"""Offered load, as a share of the pool's throughput with full chunks."""


class Setup(NamedTuple):
    """Prompts, chunk size, and the TTFT limit that defines the peak load."""

    title: str
    workload: str
    mean_tokens: float
    chunk: int
    ttft_limit_s: float


SHORT_3K = Setup("0-3K prompts, chunk 3K", "reference:workloads/short-prompts.toml", 1000, 3072, 0.8)
SHORT_5K = Setup("0-3K prompts, chunk 5K", "reference:workloads/short-prompts.toml", 1000, 5120, 1.0)


# No limit is published for long prompts: as many full passes as table 1 allows at a chunk of 3K.
LONG_16K = Setup(
    "3K-64K prompts, chunk 16K",
    "reference:workloads/long-prompts.toml",
    6700,
    16384,
    0.8 * pass_s(16384) / pass_s(3072),
)


def capacity_rps(setup: Setup, topology: str = "3p") -> float:
    """Requests/s of the pool with full chunks and without waiting."""
    return deployed(topology).pools[0].units * setup.chunk / pass_s(setup.chunk) / setup.mean_tokens


def prefill_cell(options: PaperOptions, setup: Setup, dispatch: str, share: float, topology: str = "3p") -> RunSpec:
    """One load under one dispatch policy."""
    rate = round(share * capacity_rps(setup, topology), 3)
    return simulated(
        setup.workload, "v1", UNIT, MODEL, 1024, setup.chunk, scenario="poisson",
        topology=deployed(topology, NETWORK_MS), dispatch=dispatch,
        async_scheduling=False, num_prompts=options.num_prompts or REQUESTS, request_rate=rate, max_model_len=70_000,
    )  # fmt: skip


def prefill_cells(options: PaperOptions, setup: Setup) -> list[RunSpec]:
    """All loads under all policies."""
    return [prefill_cell(options, setup, dispatch, share) for dispatch in DISPATCH for share in SHARES]


class FiguresOverLoad:
    """Figures of one policy over the load, interpolated linearly between the runs."""

    def __init__(self, options: PaperOptions, store: RunStore, setup: Setup, dispatch: str) -> None:
        found = [(share, store.get(prefill_cell(options, setup, dispatch, share))) for share in SHARES]
        self._known = [(share, measured) for share, measured in found if measured is not None]
        self.complete = len(self._known) == len(SHARES)

    def at(self, key: str, share: float, scale: float = 1.0) -> float | None:
        """One figure at a load; None if runs are missing or the load is outside their range."""
        if not self.complete or not SHARES[0] <= share <= SHARES[-1]:
            return None
        values = [measured.get(key, scale) for _, measured in self._known]
        if any(value is None for value in values):
            return None
        return float(np.interp(share, SHARES, [float(value or 0) for value in values]))

    def peak(self, ttft_limit_s: float) -> float | None:
        """The highest load whose mean TTFT is within the limit."""
        if not self.complete:
            return None
        ttft_s = [measured.get("mean_ttft_ms", 1e-3) or 0.0 for _, measured in self._known]
        over = next((i for i, value in enumerate(ttft_s) if value > ttft_limit_s), None)
        if over is None or over == 0:
            return None
        below, above = ttft_s[over - 1], ttft_s[over]
        part = (ttft_limit_s - below) / (above - below)
        return SHARES[over - 1] + part * (SHARES[over] - SHARES[over - 1])
