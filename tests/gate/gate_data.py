"""Units and commands shared by the gate's tests."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace

from typer.testing import CliRunner, Result

from ebbench.analysis.environment import ENVIRONMENT
from ebbench.analysis.units import MEASURED, GateUnit
from ebbench.cli.main import app

SMALL = (
    "run", "balanced", "--source", "profile", "-n", "64", "-c", "16", "--input-len", "64", "--output-len", "16",
    "--quiet", "--engine", "sim",
)  # fmt: skip

PYTHON = shlex.quote(sys.executable)
"""Python in scripts of tests; with the fixture ``warm`` a fork of a process that has imported ebbench."""

ENVIRONMENT_HERE = {"engine": "vllm", "device": "h200", "model": "qwen3-8b", "options": '{"max_num_seqs": 8}'}


def invoke(*args: object, env: dict[str, str] | None = None) -> Result:
    """One command, in this process."""
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "100"} | (env or {}))


def unit(seed: int = 0, **changes: object) -> GateUnit:
    """A run of a real engine with round figures; ``tokens``, ``ttft`` and ``tpot`` change these."""
    figures: dict[str, float | None] = dict.fromkeys(MEASURED)
    figures |= {
        "output_throughput": float(changes.pop("tokens", 1_000.0)),  # type: ignore[arg-type]
        "median_ttft_ms": float(changes.pop("ttft", 100.0)),  # type: ignore[arg-type]
        "median_tpot_ms": float(changes.pop("tpot", 10.0)),  # type: ignore[arg-type]
    }
    plain = GateUnit(
        environment=dict.fromkeys(ENVIRONMENT, "") | ENVIRONMENT_HERE,
        policy="v1",
        plan_hash=f"plan-{seed}",
        seed=seed,
        virtual=False,
        anchor_unix_ns=seed,
        run=f"runs/{seed}",
        figures=figures,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def side(losses: Sequence[float], figure: str = "tokens", **changes: object) -> list[GateUnit]:
    """Units whose figure is worse than :func:`unit`'s by the given factors minus one, one a seed."""
    base = {"tokens": 1_000.0, "ttft": 100.0, "tpot": 10.0}[figure]
    values = [base / (1 + loss) if figure == "tokens" else base * (1 + loss) for loss in losses]
    return [unit(seed, **{figure: value}, **changes) for seed, value in enumerate(values)]
