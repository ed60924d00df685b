"""Measures step times on an engine in virtual time with requests whose steps have known shapes, and fits the costs.

One closed-loop plan holds all probes. A probe of ``x`` prompt tokens is a single request with one output token. A probe
of ``n`` decodes at context ``c`` is ``n`` requests that decode together. A mixed probe adds single prompts of ``x``
tokens to ``n`` decodes one after the other. Single requests in between drain the engine. Step times come from the
engine's steps table. This works for engines in virtual time (sim, emulated), where a request arrives exactly when its
slot is free. A real vLLM is stepped directly instead (:mod:`ebbench.calibration.rounds`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ebbench.config.declare import Setting, parse_values
from ebbench.devices.base import Device
from ebbench.devices.costs import fixed_and_each
from ebbench.devices.geometry import ModelGeometry
from ebbench.engines import machine
from ebbench.engines.base import Engine
from ebbench.errors import DataError, InputFileError, UsageError
from ebbench.foreign.documents import read_object
from ebbench.records.plan import ClosedPhase, Plan
from ebbench.records.schema import PLAN
from ebbench.spec.commands import GridCommand
from ebbench.spec.server import EngineOptions
from vllm_eb.calibration import Calibration, CalibrationError, CostGrid, MixedCost
from vllm_eb.policy import parse_policy

NS_PER_S = 1e9
Key = tuple[int, int, int]  # prompt tokens, decoding sequences, context; 0 means none


@dataclass(frozen=True)
class ProbeGrid:
    """The grid of step shapes to measure, with ``repeats`` steps per point. ``drafts``: drafted tokens per decode."""

    tokens: tuple[int, ...]
    seqs: tuple[int, ...]
    contexts: tuple[int, ...]
    repeats: int = 8
    drafts: int = 0

    @property
    def points(self) -> int:
        """Number of measured steps."""
        decodes = len(self.seqs) * len(self.contexts)
        return self.repeats * (len(self.tokens) + decodes * (1 + len(self.tokens)))

    @property
    def probes(self) -> int:
        """Number of probes per round: one per single prompt size, and one per batch of decodes with the prompts that
        join it."""
        return len(self.tokens) + len(self.seqs) * len(self.contexts)

    @property
    def budget_tokens(self) -> int:
        """Largest number of tokens per step: the longest prompt with the largest batch."""
        return self.tokens[-1] + self.seqs[-1] * (1 + self.drafts) + 1

    def filling_steps(self, seqs: int, context: int) -> int:
        """Steps until ``seqs`` prompts of ``context`` tokens are computed, with a reserve."""
        return -(-seqs * context // self.tokens[-1]) + 4

    def kv_tokens(self, seqs: int) -> int:
        """KV tokens that ``seqs`` decodes at the longest context and one prompt need by the end of their probes."""
        steps = self.filling_steps(seqs, self.contexts[-1]) + 2 * self.repeats * (2 * len(self.tokens) + 1)
        return seqs * (self.contexts[-1] + steps + EngineOptions.block_size) + self.tokens[-1]

    def fitting(self, capacity_tokens: int) -> ProbeGrid:
        """The grid without batches that exceed the KV cache.

        Raises UsageError if fewer than two batch sizes are left.
        """
        seqs = tuple(n for n in self.seqs if self.kv_tokens(n) <= capacity_tokens)
        if len(seqs) < 2:
            needed = self.kv_tokens(self.seqs[1])
            raise UsageError(
                f"{self.seqs[1]} sequences of {self.contexts[-1]:,} tokens need room for {needed:,} tokens, "
                f"there is room for {capacity_tokens:,}; choose smaller --seqs or --contexts"
            )
        return replace(self, seqs=seqs)

    @property
    def options(self) -> EngineOptions:
        """Engine options under which every probe is one step; prefix caching is off, so that every prompt is
        computed."""
        filling = self.filling_steps(self.seqs[-1], self.contexts[-1])
        longest = max(self.tokens[-1], self.contexts[-1] + filling + 2 * self.repeats * (2 * len(self.tokens) + 1))
        return EngineOptions(
            max_num_seqs=self.seqs[-1] + 1,
            max_num_batched_tokens=self.budget_tokens,
            max_model_len=longest + 64,
            enable_prefix_caching=False,
        )


LARGE = ("256,1024,4096", "16,128,512", "128,1024")
SMALL = ("32,128,512", "1,8,32", "32,256")
"""Prompt tokens, sequences and KV tokens per decode that are measured on a GPU, and where vLLM runs on a CPU."""


def parse_grid(engine: str, asked: GridCommand) -> ProbeGrid:
    """The grid of step times to measure. Defaults are few and small where vLLM runs on a CPU. Raises UsageError."""
    default = SMALL if engine == "vllm" and not machine.visible_gpus() else LARGE
    return ProbeGrid(
        _sizes("--tokens", asked.tokens or default[0]),
        _sizes("--seqs", asked.seqs or default[1]),
        _sizes("--contexts", asked.contexts or default[2]),
    )


def _sizes(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers, separated by commas and increasing. Raises UsageError."""
    sizes = parse_values(option, text, Setting("", at_least=1, kind=int, example="32,128,512"))
    if len(sizes) < 2 or any(b <= a for a, b in pairwise(sizes)):
        raise UsageError(f"{option} {text}: at least two sizes, increasing")
    return sizes


@dataclass(frozen=True)
class MeasuredCosts:
    """A calibration with its grid, and how well the linear fits describe the step times (R squared).

    ``steps``: steps that the grid asks for; those that fill and empty the batch between them are not counted.
    ``request_s``: what a request costs beside its steps. ``drift``: time of the slowest round over the fastest's.
    ``start_s``: how long the engine took to start; 0 in virtual time.
    """

    calibration: Calibration
    prefill_r2: float
    decode_r2: float
    mixed_r2: float | None
    steps: int
    request_s: float = 0.0
    drift: float = 1.0
    start_s: float = 0.0


def calibrate(engine: Engine, device: Device, grid: ProbeGrid, source: str) -> MeasuredCosts:
    """Run the probes and fit. Raises DataError if the engine recorded too few steps of a shape."""
    plan, shapes = probe_plan(grid)
    result = engine.run(plan, parse_policy("v1"), device, grid.options, None).uninterrupted()
    seconds = step_medians(result.steps, shapes)
    return fit(cost_grid(grid, seconds), source, grid.points)


# --- probes ----------------------------------------------------------------------------------------------------


def probe_plan(grid: ProbeGrid) -> tuple[Plan, Mapping[str, Key]]:
    """The plan, and the probe that each request belongs to."""
    probes = list(_probes(grid))
    asked = [
        (key, f"probe-{number}", *lengths) for number, (key, requests, _) in enumerate(probes) for lengths in requests
    ]
    keys, phases, inputs, outputs = zip(*asked, strict=True)
    n = len(asked)
    columns = {
        "request_id": [f"c{place:06d}" for place in range(n)], "phase": phases, "input_tokens": inputs,
        "output_tokens": outputs, "session": np.arange(n), "turn": np.zeros(n, np.int32), "content": np.arange(n) + 1,
    }  # fmt: skip
    table = pa.table([columns.get(f.name, pa.nulls(n, f.type)) for f in PLAN], names=PLAN.names).cast(PLAN)
    closed = [ClosedPhase(f"probe-{number}", len(requests), most) for number, (_, requests, most) in enumerate(probes)]
    shapes = dict(zip(columns["request_id"], keys, strict=True))
    return Plan(table, tuple(closed), {"workload": "calibration probes"}), shapes


def _probes(grid: ProbeGrid) -> Iterator[tuple[Key, Sequence[tuple[int, int]], int]]:
    """Shape, requests (prompt and output tokens) and concurrency of each probe."""
    r = grid.repeats
    for x in grid.tokens:
        yield (x, 0, 0), ((x, 1),) * r, 1
    drain = (0, 0, 0), ((grid.tokens[0], 1),), 1
    for n, c in product(grid.seqs, grid.contexts):
        filling = grid.filling_steps(n, c)
        for x in (0, *grid.tokens):
            yield drain
            # The decodes last longer than the prompts that join them one at a time.
            outputs = filling + (4 if x else 2) * r
            decodes = ((max(c - outputs // 2, 1), outputs),) * n
            yield (x, n, c), decodes + (((x, 1),) * (filling + 2 * r) if x else ()), n + bool(x)
    yield drain


def step_medians(steps: pa.Table, shapes: Mapping[str, Key]) -> dict[Key, float]:
    """Median time (s) of the steps with each probe's exact shape.

    The time of a step counts from the end of the step before it in the same probe, which includes host time. A single
    prompt has no step before it, so the typical host time is added.
    """
    rows = steps.select(["instance", "start_ns", "end_ns", "prefill_tokens", "decode_seqs", "request_ids"]).to_pylist()
    rows.sort(key=lambda row: row["end_ns"])
    times_by_step: dict[Key, list[float]] = {}
    gaps: list[float] = []
    before: dict[str, Any] | None = None
    for row in rows:
        key = _shape(row, shapes)
        alone = (row["end_ns"] - row["start_ns"]) / NS_PER_S
        if key is not None:
            if not key[1]:
                times_by_step.setdefault(key, []).append(alone)
            elif before is not None and set(row["request_ids"]) & set(before["request_ids"]):
                since = (row["end_ns"] - before["end_ns"]) / NS_PER_S
                gaps.append(max(since - alone, 0.0))
                times_by_step.setdefault(key, []).append(max(since, alone))
        before = row
    host = float(np.median(gaps)) if gaps else 0.0
    return {key: float(np.median(times)) + (0.0 if key[1] else host) for key, times in times_by_step.items()}


def _shape(row: Mapping[str, Any], shapes: Mapping[str, Key]) -> Key | None:
    """The probe that a step measures; None for a step of another shape (filling, draining)."""
    keys = {shapes.get(name) for name in row["request_ids"]}
    key = keys.pop() if len(keys) == 1 else None
    return key if key and any(key) and (row["prefill_tokens"], row["decode_seqs"]) == key[:2] else None


# --- from medians to a calibration -------------------------------------------------------------------------------


def cost_grid(grid: ProbeGrid, seconds: Mapping[Key, float]) -> CostGrid:
    """The medians as a grid. Raises DataError for a point without measured steps."""

    def at(*key: int) -> float:
        if key not in seconds:
            x, n, c = key
            raise DataError(
                f"no step of {x} prompt tokens and {n} decodes at context {c} was recorded; raise --repeats, or leave "
                "this size out"
            )
        return seconds[key]  # type: ignore[index]

    prefill = np.array([at(x, 0, 0) for x in grid.tokens])
    decode = np.array([[at(0, n, c) for c in grid.contexts] for n in grid.seqs])
    mixed = np.array([[[at(x, n, c) for c in grid.contexts] for n in grid.seqs] for x in grid.tokens])
    return CostGrid(grid.tokens, grid.seqs, grid.contexts, _rising(prefill), _rising(decode), _rising(mixed))


def _rising(times: npt.NDArray[np.float64]) -> Any:
    """Times made non-decreasing along every axis: noise is removed by averaging neighbouring points.

    The mean of the smallest monotone surface above and the largest below the data; raising alone would bias times
    upwards.
    """
    above, below = times, times
    for axis in range(times.ndim):
        above = np.maximum.accumulate(above, axis=axis)
        below = np.flip(np.minimum.accumulate(np.flip(below, axis), axis=axis), axis)
    return _tuples(((above + below) / 2.0).tolist())


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def fit(
    grid: CostGrid, source: str, steps: int, *, drafts: int = 0, undrafted: CostGrid | None = None
) -> MeasuredCosts:
    """The linear controller model: alpha and beta of prefill, decode and mixed steps, beta_mb(r) over every point.

    With ``drafts`` tokens per decode, costs of decodes are per computed token.
    """
    alpha_p, beta_p, prefill_r2 = _line(grid.tokens, grid.prefill)
    computed = [n * (1 + drafts) for n in grid.seqs]
    decode_points = [(n, t) for n, row in zip(computed, grid.decode, strict=True) for t in row]
    alpha_d, beta_d, decode_r2 = _line([n for n, _ in decode_points], [t for _, t in decode_points])
    alpha_mb, mixed, mixed_r2 = _mixed(grid, computed, alpha_p)
    calibration = Calibration(
        alpha_p=alpha_p, beta_p=beta_p, alpha_d=alpha_d, beta_d=beta_d, mixed=mixed, alpha_mb=alpha_mb,
        source=source, grid=grid, undrafted=undrafted, drafts=drafts,
    )  # fmt: skip
    return MeasuredCosts(calibration, prefill_r2, decode_r2, mixed_r2, steps)


def _line(x: Any, y: Any) -> tuple[float, float, float]:
    alpha, beta = fixed_and_each(x, y)
    return alpha, beta, r_squared(y, [alpha + beta * v for v in x])


def _mixed(
    grid: CostGrid, computed: Sequence[int], alpha_p: float
) -> tuple[float | None, MixedCost | None, float | None]:
    """Fits a mixed step of x prompt tokens and n tokens of decodes (``computed``, by batch): alpha_mb + (x + n)(a +
    b r + c r^2), r = n / (x + n).

    Least squares of relative errors, so that short steps weigh as much as long ones. If a cost becomes negative,
    alpha_mb is set to alpha_p (returned as None, the authors' default); if one still is, all results are None.
    """
    shape = [(x + n, n / (x + n)) for x in grid.tokens for n in computed for _ in grid.contexts]
    tokens, shares = np.array(shape).T
    times = np.array(grid.mixed).ravel()
    terms = np.stack([np.ones_like(tokens), tokens, tokens * shares, tokens * shares**2])
    for fixed in (0, 1):
        known = alpha_p if fixed else 0.0
        solved = np.linalg.lstsq((terms[fixed:] / times).T, (times - known) / times, rcond=None)[0]
        alpha, (a, b, c) = (known if fixed else float(solved[0])), (float(v) for v in solved[-3:])
        try:
            mixed = MixedCost(a, b, c)
        except CalibrationError:
            continue
        if alpha >= 0.0:
            fitted = alpha + tokens * np.array([mixed.at(r) for r in shares])
            return None if fixed else alpha, mixed, r_squared(times, fitted)
    return None, None, None


def r_squared(y: Any, fitted: Any) -> float:
    """Share of the variance explained; 1 if there is no variance."""
    values: npt.NDArray[np.float64] = np.asarray(y, float)
    total = float(((values - values.mean()) ** 2).sum())
    residual = float(((values - np.asarray(fitted, float)) ** 2).sum())
    return 1.0 - residual / total if total > 0 else 1.0


# --- steps that torch alone has timed ------------------------------------------------------------------------------


class _Machine(msgspec.Struct):
    gpu: str
    memory_bytes: int
    torch: str


class _Timed(msgspec.Struct):
    step: Key
    times_s: list[float]


class TorchSteps(msgspec.Struct):
    """A file of ``borrowed.py steps`` (:mod:`ebbench.validation.borrowed`): the times of every step of a grid."""

    attention: str
    decoder: dict[str, int]
    grid: ProbeGrid
    manifest: _Machine
    steps: list[_Timed]


def read_steps(path: Path) -> TorchSteps:
    """Raises InputFileError that names the field, also for a file whose grid is not complete."""
    try:
        torch_steps = msgspec.convert(read_object(path, MOST_STEPS_BYTES), TorchSteps)
    except msgspec.ValidationError as error:
        raise InputFileError(path, f"is no file of `borrowed.py steps`: {error}") from None
    points = replace(torch_steps.grid, repeats=1).points
    timed = sum(bool(step.times_s) for step in torch_steps.steps)
    if timed < points:
        raise InputFileError(path, f"has {timed} of {points} steps; the same command on its machine goes on with them")
    return torch_steps


def costs_of_steps(steps: TorchSteps, model: ModelGeometry) -> MeasuredCosts:
    """The costs of the model by those steps. Raises UsageError for a model of other sizes."""
    unlike = [name for name, size in steps.decoder.items() if getattr(model, name, None) != size]
    if unlike or not model.plain or model.experts:
        sizes = ", ".join(f"{name} {steps.decoder[name]:,}" for name in unlike) or "a dense decoder in 16 bits"
        raise UsageError(f"the steps are of a decoder with {sizes}, unlike {model.name}: give its --model")
    seconds = {timed.step: float(np.median(timed.times_s)) for timed in steps.steps}
    source = f"borrowed.py steps, {model.name} on {steps.manifest.gpu}, torch {steps.manifest.torch}, {steps.attention}"
    return fit(cost_grid(steps.grid, seconds), source, steps.grid.points)


MOST_STEPS_BYTES = 16 << 20
