"""Assembles a plan from requests and a schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ebbench.config.declare import MOST_SECONDS
from ebbench.errors import UsageError
from ebbench.records.content import with_block_tokens
from ebbench.records.plan import Plan
from ebbench.records.schema import PLAN, PLAN_EXTRAS
from ebbench.traffic.schedule import Schedule, closed_phases
from ebbench.traffic.spec import ScenarioSpec
from ebbench.traffic.substreams import substream
from ebbench.workloads.arrow import int_lists, ints, strings
from ebbench.workloads.profile import draw_requests
from ebbench.workloads.requests import Floats, Int64s, Requests
from ebbench.workloads.spec import Profile


@dataclass(frozen=True)
class LengthLimits:
    """Longest prompt plus output in tokens (None: no limit), and whether longer requests are dropped or refused."""

    max_model_len: int | None = None
    drop_too_long: bool = False


def assemble(
    requests: Requests, schedule: Schedule, limits: LengthLimits, *, cap: int | None, seed: int, facts: dict[str, Any]
) -> Plan:
    """Assign phase and arrival time to each session, apply the length limit and build the table. Raises UsageError."""
    phase = schedule.phase_of_session
    arrival_s = schedule.arrival_s
    requests, kept, warnings = _within(requests, limits)
    phase = phase[kept]
    arrival_s = None if arrival_s is None else arrival_s[kept]
    if arrival_s is not None and arrival_s.size and arrival_s.max() > MOST_SECONDS:
        years = min(float(arrival_s.max()) / (365 * 86_400), 1e9)
        faster = "--speed" if facts["loop"] == "trace" else "rate (requests/s)"
        raise UsageError(f"the last request would come after {years:,.0f} years; give a higher {faster}")
    sizes = np.bincount(phase, minlength=len(schedule.names))
    table = _table(requests, schedule.names, phase, arrival_s, seed)
    phases = closed_phases(schedule, [int(size) for size in sizes]) if arrival_s is None else ()
    facts = {**facts, **_counts(requests)}
    return Plan(table, phases, facts, cap if arrival_s is not None else None, warnings)


def _counts(requests: Requests) -> dict[str, Any]:
    return {
        "sessions": requests.sessions,
        "requests": len(requests),
        "mean_input_tokens": float(np.mean(requests.input_tokens)),
        "mean_output_tokens": float(np.mean(requests.output_tokens)),
    }


def _within(requests: Requests, limits: LengthLimits) -> tuple[Requests, Int64s, tuple[str, ...]]:
    """Requests within the limit, indices of the sessions kept, and warnings."""
    everything = np.arange(requests.sessions)
    if limits.max_model_len is None:
        return requests, everything, requests.warnings
    total = requests.input_tokens.astype(np.int64) + requests.output_tokens
    fits = total <= limits.max_model_len
    if fits.all():
        return requests, everything, requests.warnings
    first = int(np.argmin(fits))
    count = int((~fits).sum())
    size = f"{requests.input_tokens[first]} + {requests.output_tokens[first]} tokens"
    name = f"request {_ids(requests)[first].as_py()} ({size})"
    if not limits.drop_too_long:
        raise UsageError(
            f"{name} and {count - 1} more of {len(requests)} do not fit max_model_len {limits.max_model_len}; "
            "raise it, or drop them with --drop-too-long"
        )
    if not fits.any():
        raise UsageError(f"none of the {len(requests)} requests fits max_model_len {limits.max_model_len}; raise it")
    note = f"{count} of {len(requests)} requests longer than max_model_len {limits.max_model_len} were dropped"
    return requests.keep(fits), np.unique(requests.session[fits]), (*requests.warnings, note)


def _table(requests: Requests, names: tuple[str, ...], phase: Int64s, arrival_s: Floats | None, seed: int) -> pa.Table:
    n = len(requests)
    # Contents of different seeds share no tokens, so that a server's prefix cache does not carry over between seeds.
    base = int(substream(seed, "content/streams").integers(1, 2**30)) << 32
    columns: dict[str, Any] = {
        "request_id": _ids(requests),
        "session": ints(requests.session, pa.int64()),
        "turn": ints(requests.turn, pa.int32()),
        "phase": strings(names).take(ints(phase[requests.session], pa.int64())),
        "arrival_ns": _arrivals_ns(requests, arrival_s),
        "input_tokens": ints(requests.input_tokens, pa.int32()),
        "output_tokens": ints(requests.output_tokens, pa.int32()),
        "content": ints((requests.session if requests.content is None else requests.content) + base, pa.int64()),
        "hash_ids": pa.nulls(n, PLAN.field("hash_ids").type) if requests.hash_ids is None else requests.hash_ids,
        "prompt": pa.nulls(n, pa.string()) if requests.prompt is None else requests.prompt,
    }
    table = pa.Table.from_arrays([columns[field.name] for field in PLAN], schema=PLAN)
    for name, values in _extras(requests).items():
        table = table.append_column(PLAN_EXTRAS.field(name), values)
    return table if requests.block_tokens is None else with_block_tokens(table, requests.block_tokens)


def _extras(requests: Requests) -> dict[str, pa.Array]:
    """The columns of PLAN_EXTRAS that the requests need."""
    found: dict[str, pa.Array] = {}
    if requests.pause_s is not None and (known := requests.pause_s > 0).any():
        ns = np.rint(np.where(known, requests.pause_s, 0.0) * 1e9)
        found["pause_ns"] = ints(ns, pa.int64(), valid=known)
    if requests.after is not None and any(waits is not None for waits in requests.after):
        found["after"] = int_lists(requests.after).cast(PLAN_EXTRAS.field("after").type)
    if requests.hang_up_s is not None and (known := np.isfinite(requests.hang_up_s)).any():
        ns = np.rint(np.where(known, requests.hang_up_s, 0.0) * 1e9)
        found["hang_up_ns"] = ints(ns, pa.int64(), valid=known)
    if requests.thinking_tokens is not None:
        found["thinking_tokens"] = ints(requests.thinking_tokens, pa.int32())
    if requests.lora is not None:
        found["lora"] = pa.array(requests.lora, pa.string())
    if requests.images is not None:
        tokens = [requests.images.tokens] * requests.images.count
        found["image_tokens"] = pa.array([tokens] * len(requests), pa.list_(pa.int32()))
        found["image_side"] = ints(np.full(len(requests), requests.images.side), pa.int32())
    return found


def _ids(requests: Requests) -> pa.Array:
    """``r000123``, or ``r000123.4`` in multi-turn workloads."""
    number = pc.utf8_lpad(ints(requests.session, pa.int64()).cast(pa.string()), 6, "0")
    ids = pc.utf8_replace_slice(number, 0, 0, "r")
    if not requests.turn.any():
        return ids
    points = strings(["."]).take(ints(np.zeros(len(requests)), pa.int64()))
    return pc.binary_join_element_wise(ids, ints(requests.turn, pa.int32()).cast(pa.string()), points)


def _arrivals_ns(requests: Requests, arrival_s: Floats | None) -> pa.Array:
    if arrival_s is None:
        return pa.nulls(len(requests), pa.int64())
    ns = np.rint(arrival_s * 1e9).astype(np.int64)
    return ints(ns[requests.session], pa.int64(), valid=requests.turn == 0)


def phase_requests(spec: ScenarioSpec, sizes: tuple[int, ...], seed: int) -> Requests:
    """Requests of a scenario with its own lengths, one random substream per phase."""
    pieces = []
    for index, (phase, size) in enumerate(zip(spec.phases, sizes, strict=True)):
        assert phase.input is not None  # the caller checked spec.own_lengths
        assert phase.output is not None
        pieces.append(draw_requests(Profile(input=phase.input, output=phase.output), size, seed, f"/{index}"))
    inputs = np.concatenate([piece.input_tokens for piece in pieces])
    outputs = np.concatenate([piece.output_tokens for piece in pieces])
    return Requests(np.arange(len(inputs)), np.zeros(len(inputs), np.int32), inputs, outputs)
