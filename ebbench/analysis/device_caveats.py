"""Which caveats of a simulated device matter to a run, with their direction and size there.

A device knows what of it was not measured or fitted; only a run knows its batches. What cannot move the run's time by
more than ``MATTERS`` is not said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ebbench.analysis.columns import RequestColumns
from ebbench.devices.base import Device, StepShape
from ebbench.devices.profiles import find_profile, list_devices
from ebbench.devices.roofline import RooflineCost
from ebbench.devices.table import TableCost
from ebbench.records.warnings import HOST_DOUBTED, HOST_UNFITTED, MIXING_UNMEASURED, Caveat, caveat
from ebbench.spec.server import HostCosts

MATTERS = 0.02
"""Smallest share of a run's time that a caveat must concern, or could change."""
MATTERS_TO_FIRST_TOKENS = 0.1
"""The same of its mean time to first token, which answers promise to within a quarter (docs/accuracy.md)."""


@dataclass(frozen=True)
class Batches:
    """The mean step of each phase (prefill, decode, mixed) with the phase's share of all step time.

    ``longest_tokens``: prompt and answer of the longest request; ``kv_peak``: highest share of KV blocks in use;
    ``ttft_ms``: mean time to first token, 0 without any.
    """

    steps: Mapping[str, tuple[float, StepShape]]
    longest_tokens: int
    mean_tokens: float
    kv_peak: float
    ttft_ms: float = 0.0


def batches_of(steps: pa.Table, requests: RequestColumns) -> Batches:
    """The batches of a run, from the columns of its steps that are no lists."""
    inputs, outputs = np.asarray(requests.input_tokens, float), np.asarray(requests.output_tokens, float)
    mean = float((inputs + outputs).mean()) if len(inputs) else 0.0
    context = float((inputs + outputs / 2).mean()) if len(inputs) else 0.0
    spent = pc.subtract(steps["end_ns"], steps["start_ns"]).to_numpy().astype(float)
    prompts, decodes = (steps[name].to_numpy().astype(float) for name in ("prefill_tokens", "decode_seqs"))
    whole = float(spent.sum()) or 1.0
    kinds = {}
    for phase in ("prefill", "decode", "mixed"):
        rows = pc.equal(steps["phase"], phase).to_numpy()
        if rows.any():
            shape = _shape(float(prompts[rows].mean()), float(decodes[rows].mean()), context)
            kinds[phase] = float(spent[rows].sum()) / whole, shape
    used = steps["kv_blocks_used"].to_numpy() / np.maximum(steps["kv_blocks_total"].to_numpy(), 1)
    longest = int((inputs + outputs).max()) if len(inputs) else 0
    waited = (requests.first_token - requests.intended)[requests.ok]
    ttft_ns = float(waited.mean()) if len(waited) else 0.0
    return Batches(kinds, longest, mean, float(used.max(initial=0.0)), ttft_ns / 1e6)


def _shape(prompt_tokens: float, decodes: float, context: float) -> StepShape:
    tokens, seqs = round(prompt_tokens), round(decodes)
    return StepShape(((tokens, 0),) if tokens else (), seqs, round(seqs * context), seqs + (tokens > 0))


def said_of_run(device: Device, batches: Batches, warnings: Iterable[str]) -> list[str]:
    """The warnings as far as they matter to a run of such batches, with their direction and size there."""
    if device.profile is None or device.request is None or device.geometry is None or not batches.steps:
        return list(warnings)
    found = (_sized(each, device, batches) if isinstance(each, Caveat) else each for each in warnings)
    return [each for each in found if each is not None]


def _sized(said: Caveat, device: Device, batches: Batches) -> Caveat | None:
    """A caveat with its size in such a run; None if it does not matter to it."""
    profile, request, cost = device.profile, device.request, device.cost
    assert profile is not None
    assert request is not None
    if said.code == HOST_UNFITTED and isinstance(cost, TableCost | RooflineCost):
        # What the constants that were fitted on other GPUs would change in the run's time.
        changes = [_change(cost, replace(cost, host=host), batches) for host in _fitted_hosts(request.parallel.tp)]
        least, most = min(changes), max(changes)
        matters = max(-least, most) >= MATTERS
        return caveat(said.code, **said.values, change_low=least, change_high=most) if matters else None
    if said.code == MIXING_UNMEASURED:
        share = batches.steps.get("mixed", (0.0, None))[0]
        leaning = profile.mixed_leaning
        return caveat(said.code, **said.values, share=share, leaning=leaning) if share > MATTERS else None
    if said.code == HOST_DOUBTED and isinstance(cost, TableCost):
        return said if _host_decides(cost, batches) else None
    return said


def shown_by_servers(device: Device, batches: Batches) -> list[str]:
    """What measured servers with this GPU had that is not modelled, where it is much of a run of such batches."""
    profile = device.profile
    if profile is None or not profile.front_end_ms:
        return []
    said: list[str] = []
    share = profile.front_end_ms / max(batches.ttft_ms, profile.front_end_ms)
    if share > MATTERS_TO_FIRST_TOKENS:
        said.append(caveat("front-end-unmodelled", front_end_ms=profile.front_end_ms, share=share))
    spent, decodes = batches.steps.get("decode", (0.0, None))
    mixture = device.geometry is not None and device.geometry.experts > 0 and isinstance(device.cost, TableCost)
    if mixture and decodes is not None and spent > 0.5 and decodes.decode_seqs <= FEW_SEQUENCES:
        said.append(caveat("experts-few-sequences"))
    return said


FEW_SEQUENCES = 8
"""Sequences in a step up to which what is not modelled of a mixture of experts was seen (InferenceX: gpt-oss on eight
GPUs, MiniMax)."""


def _fitted_hosts(tp: int) -> list[HostCosts]:
    hosts = [find_profile(name).host.get("default") for name in list_devices()]
    found = [host.with_workers(tp) for host in hosts if host is not None and host.fitted]
    return [host for host in found if not host.doubt]


def _change(cost: TableCost | RooflineCost, other: TableCost | RooflineCost, batches: Batches) -> float:
    return sum(share * (other.step_s(shape) / cost.step_s(shape) - 1.0) for share, shape in batches.steps.values())


def _host_decides(cost: TableCost, batches: Batches) -> bool:
    """Whether the host takes longer than the GPU in steps that take more than ``MATTERS`` of the time."""
    free = replace(cost, host=replace(cost.host, step_s=0.0, sequence_s=0.0))
    return sum(s for s, shape in batches.steps.values() if cost.step_s(shape) > free.step_s(shape)) > MATTERS
