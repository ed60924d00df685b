"""Turns an engine's result into a stored run: validity, warnings and manifest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ebbench.analysis.columns import RequestColumns
from ebbench.analysis.environment import FRONT_END_MS
from ebbench.analysis.explain import STEP_COLUMNS, KvPressure, kv_pressure, kv_pressure_by_metrics
from ebbench.analysis.metrics import QUANTILES, Metrics, Slo, latency_columns, measure, samples_needed, steady_windows
from ebbench.analysis.sessions import sessions_table
from ebbench.analysis.summary import Summary, make_summary
from ebbench.analysis.validity import invalid_reasons
from ebbench.config.topology import PoolSpec, TopologySpec
from ebbench.devices.base import Device, StepShape
from ebbench.engines.base import EngineResult, start_notes
from ebbench.errors import RunError
from ebbench.records.manifest import (
    Clock,
    Manifest,
    RunLabels,
    git_commit,
    plan_hash,
    software_versions,
)
from ebbench.records.plan import Plan, with_plan_columns
from ebbench.records.run import NotStoredError, Run, RunWriter
from ebbench.records.schema import DECISIONS, REQUEST_LATENCIES, REQUESTS, STEPS
from ebbench.records.warnings import (
    HOST_DOUBTED,
    HOST_UNFITTED,
    MIXING_UNMEASURED,
    RunWarning,
    warning,
)
from ebbench.spec.server import VIRTUAL_TIME, EngineOptions, HostCosts
from vllm_eb.policy import PolicySpec

if TYPE_CHECKING:
    from ebbench.devices.costs import RooflineCost, TableCost


MATTERS = 0.02
"""Smallest share of a run's time that a caveat must concern, or could change."""
FRONT_DECIDES = 0.4
"""Share of the mean time to first token from which on what is in front of the engine decides it."""
FIRST_TOKENS_MS = 1000.0
"""Mean time to first token from which on waiting for other requests decides it, not a prompt's own steps."""


@dataclass(frozen=True)
class Batches:
    """The mean step of each phase (prefill, decode, mixed) with the phase's share of all step time.

    ``ttft_ms``: mean time to first token, 0 without any; ``prompt_tokens``: mean prompt. ``kv_share``: of the KV cache,
    the most in use; ``running``: the most sequences at once.
    """

    steps: Mapping[str, tuple[float, StepShape]]
    ttft_ms: float = 0.0
    prompt_tokens: float = 0.0
    kv_share: float = 0.0
    running: int = 0


def mean_batches(steps: pa.Table, requests: RequestColumns) -> Batches:
    """The batches of a run, from the columns of its steps that are no lists."""
    inputs, outputs = np.asarray(requests.input_tokens, float), np.asarray(requests.output_tokens, float)
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
    waited = (requests.first_token - requests.intended)[requests.ok]
    ttft_ns = float(waited.mean()) if len(waited) else 0.0
    shares = pc.divide(steps["kv_blocks_used"].cast(pa.float64()), pc.max_element_wise(steps["kv_blocks_total"], 1))
    most, running = pc.max(shares).as_py() or 0.0, pc.max(steps["running"]).as_py() or 0
    return Batches(kinds, ttft_ns / 1e6, float(inputs.mean()) if len(inputs) else 0.0, most, running)


def _shape(prompt_tokens: float, decodes: float, context: float) -> StepShape:
    tokens, seqs = round(prompt_tokens), round(decodes)
    return StepShape(((tokens, 0),) if tokens else (), seqs, round(seqs * context), seqs + (tokens > 0))


def said_of_run(device: Device, batches: Batches, warnings: Iterable[RunWarning]) -> list[RunWarning]:
    """The warnings as far as they matter to a run of such batches, with their direction and size there."""
    if device.profile is None or device.request is None or device.geometry is None or not batches.steps:
        return list(warnings)
    sized = (_sized(said, device, batches) for said in warnings)
    return [said for said in sized if said is not None]


def _sized(said: RunWarning, device: Device, batches: Batches) -> RunWarning | None:
    """A caveat with its size in such a run; None if it does not matter to it."""
    from ebbench.devices.costs import RooflineCost, TableCost

    profile, request, cost = device.profile, device.request, device.cost
    assert profile is not None
    assert request is not None
    if said.code == HOST_UNFITTED and isinstance(cost, TableCost | RooflineCost):
        # What the constants that were fitted on other GPUs would change in the run's time.
        changes = [_change(cost, replace(cost, host=host), batches) for host in _fitted_hosts(request.parallel.tp)]
        least, most = min(changes), max(changes)
        matters = max(-least, most) >= MATTERS
        return warning(said.code, **said.values, change_low=least, change_high=most) if matters else None
    if said.code == MIXING_UNMEASURED:
        share = batches.steps.get("mixed", (0.0, None))[0]
        leaning = profile.mixed_leaning
        return warning(said.code, **said.values, share=share, leaning=leaning) if share > MATTERS else None
    if said.code == HOST_DOUBTED and isinstance(cost, TableCost):
        return said if _host_decides(cost, batches) else None
    return said


def shown_by_servers(device: Device, batches: Batches) -> list[RunWarning]:
    """What measured servers with this GPU had that is not modelled, where it is much of a run of such batches."""
    from ebbench.devices.costs import TableCost
    from ebbench.devices.loader import TABLES_SINCE, older_than

    profile, model, request = device.profile, device.geometry, device.request
    if profile is None or model is None or request is None or not isinstance(device.cost, TableCost):
        return []
    mixture, several = model.experts > 0, request.parallel.gpus >= FROM_GPUS
    first_tokens = profile.front_end and 0 < batches.ttft_ms < FIRST_TOKENS_MS
    spent, decodes = batches.steps.get("decode", (0.0, None))
    seqs = 0 if decodes is None or spent <= 0.5 else decodes.decode_seqs
    low, high = _JUMP_BYTES.get(request.parallel.tp, (0, 0)) if profile.name in _BLACKWELL else (0, 0)
    blocks = mixture and model.dtype_of_experts == "fp8_block" and profile.name in _BLOCKS_ON
    queued = batches.ttft_ms >= FIRST_TOKENS_MS and profile.name in _QUEUED_ON and older_than(request, QUEUED_SINCE)
    seen = {
        "older-vllm-queue": queued,
        "older-vllm-short-prompts": queued and batches.prompt_tokens < SHORT_PROMPT,
        "older-vllm-experts": mixture and profile.name in _BLACKWELL and older_than(request, TABLES_SINCE),
        "experts-first-tokens": mixture and first_tokens,
        "experts-few-sequences": mixture and several and 0 < seqs <= FEW_SEQUENCES and profile.front_end,
        "experts-in-blocks": blocks and seqs >= FROM_SEQUENCES,
        "first-tokens-without-graphs": not mixture and first_tokens and profile.name in _BLACKWELL,
        "fused-all-reduce": not mixture and low < seqs * model.hidden * model.dtype_bytes <= high,
    }
    named = {"gpus": request.parallel.tp, "device": profile.name}
    return [warning(code, **named) for code, holds in seen.items() if holds] + of_layers(device)


def of_layers(device: Device) -> list[RunWarning]:
    """What is known of the times of a model's kinds of layers."""
    mixers = () if device.geometry is None else device.geometry.mixers
    known = {
        "delta-rule-steps": any(mixer.sizes for mixer in mixers),
        "compressed-steps": any(mixer.kind == "compressed" for mixer in mixers),
        "sparse-latent-prompts": any(mixer.kind == "latent" and mixer.window for mixer in mixers),
    }
    return [warning(code) for code, holds in known.items() if holds]


_BLACKWELL, FROM_GPUS = ("b200", "b300"), 4
"""Where servers of dense models took longer for prompts than their kernels do (InferenceX, Llama-3.3-70B, 0.10.2: B200,
whose recipe captured CUDA graphs of decodes only); and from how many GPUs on steps of mixtures took longer with few
sequences."""
_JUMP_BYTES = {4: (256 * 1024, 512 * 1024), 8: (128 * 1024, 512 * 1024)}
"""By the number of B200: bytes above and up to which vLLM's own all-reduce takes two to three times as long."""
_BLOCKS_ON, FROM_SEQUENCES = ("h200",), 12
"""Where, and from how many sequences in a step on, mixtures in FP8 blocks came out too slow (InferenceX, MiniMax)."""
_QUEUED_ON, QUEUED_SINCE = ("h100", "a100"), (0, 12)
"""Where, and up to which version, servers with a queue were slower than their steps (GPUStack)."""
SHORT_PROMPT = 256
"""Tokens of a mean prompt below which these servers' front end decided (GPUStack)."""
FULL_KV = 0.8
"""Share of the KV cache in use at its fullest from which on its size decides whether requests wait."""
FEW_SEQUENCES = 8
"""Sequences in a step up to which what is not modelled of a mixture of experts was seen (InferenceX: gpt-oss on eight
GPUs, MiniMax)."""


def _fitted_hosts(tp: int) -> list[HostCosts]:
    from ebbench.devices.profiles import find_profile, list_devices

    hosts = [find_profile(name).host.get("default") for name in list_devices()]
    fitted = [host.with_workers(tp) for host in hosts if host is not None and host.fitted]
    return [host for host in fitted if not host.doubt]


def _change(cost: TableCost | RooflineCost, other: TableCost | RooflineCost, batches: Batches) -> float:
    return sum(share * (other.step_s(shape) / cost.step_s(shape) - 1.0) for share, shape in batches.steps.values())


def _host_decides(cost: TableCost, batches: Batches) -> bool:
    """Whether the host takes longer than the GPU in steps that take more than ``MATTERS`` of the time."""
    free = replace(cost, host=replace(cost.host, step_s=0.0, sequence_s=0.0))
    return sum(s for s, shape in batches.steps.values() if cost.step_s(shape) > free.step_s(shape)) > MATTERS


_BEGIN = 1 / 3  # figures per pass exclude this first share of the time in which requests are sent


class _Passes:
    """Steps of one pool. Steps that the units of an instance begin at the same time are one pass."""

    def __init__(self, result: EngineResult, first: int, pool: PoolSpec) -> None:
        self.window_s = _window_s(result)
        steps = result.steps
        unit = steps["instance"].to_numpy() - first
        mine = (unit >= 0) & (unit < pool.units)
        start = steps["start_ns"].to_numpy()[mine]
        self.unit, self.pool = unit[mine], pool
        self.seconds = (steps["end_ns"].to_numpy()[mine] - start) / 1e9
        self.tokens = steps["prefill_tokens"].to_numpy()[mine]
        self.decodes = steps["decode_seqs"].to_numpy()[mine]
        self.kv_tokens = steps["kv_blocks_used"].to_numpy()[mine].astype(float) * 16
        self.start_s = start / 1e9
        node = self.unit // pool.dp
        _, self.first_of, self.number = np.unique(
            np.stack([node, start]), axis=1, return_index=True, return_inverse=True
        )
        self.number = self.number.reshape(-1)

    @property
    def steady(self) -> npt.NDArray[np.bool_]:
        """Mask of steps while requests are sent, without the initial part."""
        begin_s, end_s = self.window_s
        inside: npt.NDArray[np.bool_] = (self.start_s >= begin_s) & (self.start_s <= end_s)
        return inside

    @property
    def _span_s(self) -> float:
        return self.window_s[1] - self.window_s[0]

    def busy(self) -> float:
        """Share of the time in which an instance computes."""
        spent = float(self.seconds[self.first_of][self.steady[self.first_of]].sum())
        return spent / (self.pool.instances * self._span_s)

    def chunk_utilisation(self, chunk: int) -> float | None:
        """Prompt tokens over the capacity of the units' chunks, per pass that computed prompts."""
        steady = self.steady
        tokens = np.bincount(self.number[steady], self.tokens[steady])
        passes = int((tokens > 0).sum())
        return float(tokens.sum()) / (passes * self.pool.dp * chunk) if passes else None

    def kv_spread(self) -> dict[str, float]:
        """KV tokens over the units of an instance: time averages of mean and deviation, and the peak."""
        steady = self.steady
        passes = np.unique(self.number[steady], return_inverse=True)[1]
        if not len(passes):
            return {}
        table = np.zeros((passes.max() + 1, self.pool.dp))
        table[passes, self.unit[steady] % self.pool.dp] = self.kv_tokens[steady]
        return {
            "kv_mean_tokens": float(table.mean()),
            "kv_std_tokens": float(table.std(axis=1).mean()),
            "kv_peak_tokens": float(table.max()),
        }

    def decode_rate(self) -> float:
        """Generated tokens per second."""
        return float(self.decodes[self.steady].sum()) / self._span_s

    def decode_batch(self) -> float | None:
        """Sequences that a unit decodes per pass."""
        passes = len(np.unique(self.number[self.steady]))
        return float(self.decodes[self.steady].sum()) / (passes * self.pool.dp) if passes else None


def _window_s(result: EngineResult) -> tuple[float, float]:
    """Start and end (s): the last two thirds of the time in which requests are sent; the whole run if all are sent at
    once."""
    sent = np.asarray(result.requests["sent_ns"].drop_null())
    steps_end = float(np.asarray(result.steps["end_ns"]).max())
    last = float(sent.max()) if len(sent) else 0.0
    end = last if last > steps_end / 10 else steps_end
    return _BEGIN * end / 1e9, end / 1e9


def pool_figures(result: EngineResult, spec: TopologySpec, max_num_batched_tokens: int) -> dict[str, Any]:
    """Figures of a cluster run by name; None if undefined. ``dead``: why a decode unit ended the run.

    ``max_num_batched_tokens``: token budget of instances for which the topology sets none.
    """
    figures: dict[str, Any] = {name: result.facts.get(name) for name in ("dispatch_wait_ms", "device_wait_ms")}
    figures["dead"] = result.invalid[0].to_dict(str(result.invalid[0])) if result.invalid else None
    figures["receive_store_peak_gb"] = result.facts.get("receive_store_peak_gb")
    if not result.steps.num_rows:
        return figures
    first = 0
    for name, pool in (("front", spec.pools[0]), ("decode", spec.decode)):
        if pool is None:
            continue
        passes = _Passes(result, first, pool)
        chunk = pool.max_num_batched_tokens or max_num_batched_tokens
        figures[f"{name}_busy"] = passes.busy()
        figures[f"{name}_chunk_utilisation"] = passes.chunk_utilisation(chunk)
        figures |= {f"{name}_{key}": value for key, value in passes.kv_spread().items()}
        figures[f"{name}_decode_rate"] = passes.decode_rate()
        figures[f"{name}_decode_batch"] = passes.decode_batch()
        first += pool.units
    return figures


@dataclass(frozen=True)
class RunContext:
    """Everything that determines a result. ``anchor_unix_ns``: wall-clock time (ns) of the run's time 0.

    ``device_known`` False: the engine is a server that ebbench did not start; its device and options are unknown.
    """

    plan: Plan
    policy: PolicySpec
    engine: str
    device: Device
    options: EngineOptions
    anchor_unix_ns: int
    clock: Clock | None = None  # None: derived from the engine's name
    slo: Slo = field(default_factory=Slo)
    device_known: bool = True
    warnings: tuple[RunWarning, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    labels: RunLabels = RunLabels()  # noqa: RUF009 - frozen

    @property
    def kind_of_time(self) -> Clock:
        """Whether times are measured (real) or simulated (virtual)."""
        return self.clock or ("virtual" if self.engine in VIRTUAL_TIME else "real")


def begin(writer: RunWriter, context: RunContext) -> None:
    """Store what is known before a run in real time, so that an interrupted run can be rebuilt."""
    nothing = EngineResult(REQUESTS.empty_table(), STEPS.empty_table(), DECISIONS.empty_table(), interrupted=True)
    reasons = (warning("cut-off"),)
    writer.begin(_manifest(context, nothing, context.kind_of_time, reasons, ()), context.plan.table)


def conclude(writer: RunWriter, context: RunContext, result: EngineResult) -> tuple[Run, Summary]:
    """Check a result and store it with its plan. Returns the run and its summary.

    Raises NotStoredError, which holds the run, if it cannot be written.
    """
    result = replace(result, requests=with_plan_columns(result.requests, context.plan.table))
    columns = RequestColumns.of(result.requests)
    windows = steady_windows(columns, context.plan.phases)
    metrics = measure(columns, slo=context.slo, windows=windows)
    clock = context.kind_of_time
    paced = clock == "real" and (context.plan.closed_loop or context.plan.max_concurrency is None)
    reasons = (
        *invalid_reasons(
            result.requests, context.plan.table, columns, metrics,
            interrupted=result.interrupted, paced_sends=paced, lag_limit_ms=result.facts.get("lag_limit_ms"),
        ),
        *result.invalid,
    )  # fmt: skip
    # Without the lists of their requests, which are most of a long run.
    steps = pa.concat_tables([part.select([*STEP_COLUMNS, "phase"]) for part in result.step_parts or [result.steps]])
    kv = _kv_pressure(context, result, steps)
    warnings = (
        *_warnings(context, result, metrics, mean_batches(steps, columns)),
        *_one_token_warnings(columns, context.slo),
        *(kv.warnings if kv is not None else ()),
    )
    result = replace(result, facts={**result.facts, **(kv.figures if kv is not None else {})})
    manifest = _manifest(context, result, clock, reasons, warnings)
    requests = result.requests
    for name, values in latency_columns(columns, context.slo).items():
        requests = requests.append_column(REQUEST_LATENCIES.field(name), values)
    tables = {
        "plan": context.plan.table,
        "requests": requests,
        "steps": result.steps if result.step_parts is None else result.step_parts,
        "decisions": result.decisions,
    }
    if result.server_metrics is not None and result.server_metrics.num_rows:
        tables["server_metrics"] = result.server_metrics
    summary = make_summary(Run(writer.path, manifest, tables), metrics, context.slo, columns)
    tables["summary"] = summary.to_table()
    if summary.classes:
        tables["classes"] = summary.classes_table()
    if (sessions := sessions_table(columns)) is not None:
        tables["sessions"] = sessions
    try:
        run = writer.finish(manifest, tables)
    except NotStoredError:
        raise  # it holds the run, stored elsewhere
    except RunError as error:
        why = warning("not-stored", error=str(error))
        lost = msgspec.structs.replace(manifest, valid=False, reasons=(*manifest.reasons, why))
        whole = tables if result.step_parts is None else tables | {"steps": result.step_parts.table()}
        raise NotStoredError(str(error), Run(writer.path, lost, whole)) from error
    return run, replace(summary, run_dir=str(run.path), warnings=run.manifest.warnings)


def _kv_pressure(context: RunContext, result: EngineResult, steps: pa.Table) -> KvPressure | None:
    options = asdict(context.options) if context.device_known else {}
    if steps.num_rows or result.server_metrics is None:
        return kv_pressure(steps, result.requests, options)
    return kv_pressure_by_metrics(result.server_metrics, result.requests.num_rows, options.get("max_num_seqs"))


def _manifest(
    context: RunContext,
    result: EngineResult,
    clock: Clock,
    reasons: tuple[RunWarning, ...],
    warnings: tuple[RunWarning, ...],
) -> Manifest:
    plan, device = context.plan, result.device or context.device
    facts = {**plan.facts, **result.facts, **(dict(device.identity) if context.device_known else {})}
    versions = dict(context.versions)
    if context.engine != "sim":
        from ebbench.engines.machine import engine_versions

        versions = engine_versions(context.engine) | versions
    return Manifest(
        versions=software_versions(versions),
        git_commit=git_commit(),
        labels=context.labels,
        anchor_unix_ns=context.anchor_unix_ns,
        workload=str(facts.get("workload", "")),
        scenario=str(facts.get("scenario", "")),
        seed=int(facts.get("seed", 0)),
        source=str(facts.get("source", "")),
        facts=facts,
        plan_hash=plan_hash(plan),
        phases=plan.phases,
        max_concurrency=plan.max_concurrency,
        policy=context.policy.name,
        engine=context.engine,
        clock=clock,
        device=device.name,
        model=str(facts.get("served_model") or device.model),
        device_provenance=device.sources,
        kv_capacity_tokens=_kv_tokens(context, device, facts),
        calibration=asdict(device.calibration) if context.device_known and device.costs_known else None,
        options=asdict(context.options) if context.device_known else {},
        slo=context.slo.limits(),
        warnings=warnings,
        valid=not reasons,
        reasons=reasons,
        interrupted=result.interrupted,
    )


def _kv_tokens(context: RunContext, device: Device, facts: Mapping[str, Any]) -> int | None:
    """KV cache of an instance in tokens; None if it is unknown, as behind a server that ebbench did not start.

    That of a server that it did start is what the server reports: its tokens, or of older versions its blocks, which
    hold so many tokens if every layer keeps them all.
    """
    if not context.device_known:
        return None
    if context.engine != "vllm":
        return device.kv_capacity_tokens or None
    reports = facts.get("server_reports") or {}
    blocks, size = reports.get("num_kv_blocks"), reports.get("block_size")
    return reports.get("kv_cache_tokens") or (blocks * size if blocks and size else None)


def _warnings(context: RunContext, result: EngineResult, metrics: Metrics, batches: Batches) -> tuple[RunWarning, ...]:
    simulated = context.engine in VIRTUAL_TIME
    of_device, of_engine = _caveats(context, result, batches)
    warnings = [
        *_about("plan", context.plan.warnings),
        *_about("device", of_device),
        *_about("engine", of_engine),
        *_about("engine", start_notes(result.device or context.device, context.options) if simulated else ()),
        *context.warnings,
        *_measurement_warnings(context.plan, metrics),
    ]
    once: dict[str, RunWarning] = {}
    for stored in warnings:
        once.setdefault(str(stored), stored)
    return tuple(once.values())


def _caveats(context: RunContext, result: EngineResult, batches: Batches) -> tuple[list[RunWarning], list[RunWarning]]:
    """The warnings of the device, and of the engine about its units, that matter to this run.

    Measured times depend on the device's caveats only if the policy computes with its costs.
    """
    device = result.device or context.device
    if context.engine not in VIRTUAL_TIME:
        return (list(device.warnings) if context.policy.needs_costs else []), list(result.warnings)
    front = float(result.facts.get(FRONT_END_MS) or 0.0)
    share = front / max(batches.ttft_ms, front or 1.0)
    of_front = [warning("front-end-decides", front_end_ms=front, share=share)] if share >= FRONT_DECIDES else []
    of_device = [*said_of_run(device, batches, device.warnings), *shown_by_servers(device, batches), *of_front]
    seats_taken = not context.plan.closed_loop and batches.running >= context.options.running_limit
    if device.profile is not None and (seats_taken or batches.kv_share >= FULL_KV):
        of_device.append(warning("near-capacity", kv_percent=100 * batches.kv_share, running=batches.running))
    return of_device, said_of_run(device, batches, result.warnings)


def _about(about: str, said: Iterable[RunWarning]) -> list[RunWarning]:
    return [msgspec.structs.replace(text, about=about) for text in said]


_LONGER = 3.0
"""Sessions over those of warm-up and drain in a run that is asked for: two thirds of it are steady then."""


def _measurement_warnings(plan: Plan, metrics: Metrics) -> list[RunWarning]:
    warnings = []
    needed = samples_needed(0.99)
    if 0 < metrics.completed < needed:
        sound = [name for name, share in QUANTILES.items() if metrics.completed >= samples_needed(share)]
        enough = _option_for_requests(plan, needed) | {"shown": sound[-1] if sound else ""}
        p90_needs = samples_needed(QUANTILES["p90"])
        warnings.append(warning("few-requests", completed=metrics.completed, p90_needs=p90_needs, **enough))
    if metrics.completed and metrics.steady is None:
        longer = _option_for_sessions(plan, 2 * _sessions(plan))
        warnings.append(warning("no-steady-window", closed_loop=plan.closed_loop, **longer))
    elif metrics.steady is not None and metrics.steady.share < 0.5:
        longer = _option_for_sessions(plan, math.ceil(_LONGER * (1 - metrics.steady.share) * _sessions(plan)))
        warnings.append(warning("short-steady-window", share=metrics.steady.share, **longer))
    return warnings


def _one_token_warnings(columns: RequestColumns, slo: Slo) -> list[RunWarning]:
    """How many answers a limit on TPOT does not concern, where these are at least one in a hundred of its class."""
    limited = [(columns.ok & (columns.request_class == name), slo.of_class(name).tpot) for name in columns.classes]
    warnings = []
    for answers, tpot_ms in limited if slo.classes else [(columns.ok, slo.tpot)]:
        total, single = int(answers.sum()), int((answers & (columns.sent_tokens < 2)).sum())
        if tpot_ms is not None and single and single >= 0.01 * total:
            warnings.append(warning("one-token-answers", single=single, answers=total, tpot_ms=tpot_ms))
    return warnings


def _sessions(plan: Plan) -> int:
    return int(pc.count_distinct(plan.table["session"]).as_py())


def _option_for_sessions(plan: Plan, sessions: int) -> dict[str, Any]:
    """The option with which a plan like this one has that many sessions, and how many its log holds."""
    own_texts = "log_sessions" in plan.facts and plan.table["prompt"].null_count < len(plan)  # which are sent once
    option = "log" if own_texts else "num_prompts"
    return {"option": option, "asked": sessions, "log_sessions": plan.facts.get("log_sessions")}


def _option_for_requests(plan: Plan, requests: int) -> dict[str, Any]:
    """The option with which a plan like this one has that many requests; --num-prompts counts conversations."""
    duration_s, sessions = plan.facts.get("duration_s"), _sessions(plan)
    asked = _option_for_sessions(plan, math.ceil(requests * sessions / len(plan))) | {"needed": requests}
    if asked["option"] == "log":
        return asked
    if duration_s is not None and (plan.closed_loop or "log_sessions" in plan.facts):
        return asked | {"option": "both"}
    if duration_s is not None:
        return asked | {"option": "duration", "asked": math.ceil(requests * duration_s / len(plan))}
    return asked | {"per_session": len(plan) / sessions}
