"""The result of ``ebbench plan`` as a table, as sentences and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import to_builtins
from rich.table import Table

from ebbench.analysis.validity import by_settings, told_once
from ebbench.config.declare import option_name
from ebbench.devices.profiles import find_model
from ebbench.records.warnings import RunWarning, Texts
from ebbench.render import numbers
from ebbench.render.tables import framed
from ebbench.sizing.choose import Costed, DeploymentPlan
from ebbench.sizing.deployments import (
    NOISE,
    USUAL_HEADROOM,
    WITHIN,
    Candidate,
    Level,
    PlanTask,
    caveats,
)
from ebbench.spec.server import ENGINE_ALONE, EngineOptions


def _missed_alone(met: Mapping[str, float], attainment: float, least_ms: Mapping[str, float | None]) -> str:
    missed = ", ".join(f"{name} {100 * share:.0f} %" for name, share in met.items())
    least = " ".join(f"{name}:{numbers.up(value)}" for name, value in least_ms.items() if value)
    return f"misses the limits even one request at a time ({missed}; alone, p{100 * attainment:g} is {least})"


REFUSALS: Texts = {
    "cannot_run": "{error}",
    "missed_alone": _missed_alone,
    "missed_dispatched": "{replicas} replicas behind a dispatcher still miss the limits, not sized",
    "too_dear": "would cost more than {times:g} times the cheapest deployment found",
    "too_many_replicas": "needs more than {most} replicas",
}
"""Why a candidate is left out."""


def parts(plan: DeploymentPlan) -> list[Table | str]:
    """The printed tables and sentences, in order."""
    task = plan.task
    lines: list[Table | str] = [
        f"{task.model}, {task.spec.plan.workload}: {task.rate:g} sessions/s within {task.limits}. Simulated on device "
        f"models that hold as much KV cache as vLLM {task.vllm}{_types(task)}{_in_front(task)}; "
        "reports/fidelity/ has the error of each."
    ]
    if plan.carrying:
        lines += ["", _table(plan), *_legend(plan)]
        lines += ["", _efficiency(plan), _EFFICIENT]
        lines += [f"Prices in {plan.priced_in}."] if plan.priced_in else []
        lines += ["", *_remarks(plan), ""]
    else:
        lines.append(f"No candidate carries {_carried(task)}{',' if task.spare else ''} within the limits.")
    lines += _experts(plan)
    if plan.unbounded:
        lines.append(
            "The workload has too few sessions to fill a batch, so no saturated rate bounds the number of replicas: "
            "near saturation a queue may grow too slowly for runs of this length to show it."
        )
    reasons: dict[str, list[Candidate]] = {}
    for candidate, reason in plan.refused:
        reasons.setdefault(reason.worded(REFUSALS), []).append(candidate)
    lines += [
        f"{_count(candidates)} left out: {reason} ({_names(candidates, plan)})."
        for reason, candidates in sorted(reasons.items(), key=lambda item: -len(item[1]))
    ]
    if plan.pruned:
        lines.append(
            f"{_count(plan.pruned)} left out: at their saturated rate, which no load within limits exceeds "
            f"({100 * (NOISE - 1):.0f} % added for noise), or as sized, they cost more than {WITHIN:g} times the "
            f"cheapest ({_names(plan.pruned, plan)})."
        )
    return [*lines, *map(numbers.sentence, plan.notes)]


def _count(candidates: Sequence[Candidate]) -> str:
    return f"{len(candidates)} candidate{'s' if len(candidates) > 1 else ''}"


def _names(candidates: Sequence[Candidate], plan: DeploymentPlan) -> str:
    """``l40s tp1, h100 tp1 tp2 (v1)``: the policies where not all candidates of a device and shape are named."""
    all_policies = _policies(_all_candidates(plan))
    by_device: dict[tuple[str, str], list[str]] = {}
    for (device, shape), policies in _policies(candidates).items():
        named = "" if policies == all_policies.get((device, shape)) else f" ({', '.join(policies)})"
        by_device.setdefault((device, named), []).append(shape)
    return ", ".join(f"{device} {' '.join(shapes)}{named}" for (device, named), shapes in by_device.items())


def _policies(candidates: Iterable[Candidate]) -> dict[tuple[str, str], list[str]]:
    """The policies, with B and N where they differ, of each device and shape."""
    candidates = list(candidates)
    varied = _varied(candidates)
    policies: dict[tuple[str, str], list[str]] = {}
    for candidate in sorted(
        candidates, key=lambda candidate: (candidate.device, candidate.gpus, candidate.policy, varied(candidate))
    ):
        policies.setdefault((candidate.device, _short(candidate)), []).append(candidate.policy + varied(candidate))
    return policies


def _all_candidates(plan: DeploymentPlan) -> list[Candidate]:
    return [
        *(entry.deployment.candidate for entry in plan.carrying),
        *(entry for entry, _ in plan.refused),
        *plan.pruned,
    ]


def _in_front(task: PlanTask) -> str:
    """What of a replica's front end was asked for."""
    asked = {name: getattr(task.spec.server, name) for name in ENGINE_ALONE}
    words = [f"{option_name(name)} {asked[name]}" for name in asked if asked[name] != getattr(EngineOptions, name)]
    return f", {' '.join(words)}" if words else ""


def _table(plan: DeploymentPlan) -> Table:
    task, varied = plan.task, _varied_of(plan)
    table = framed()
    table.add_column("  device", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("policy", overflow="fold", min_width=8)
    latencies = ("TTFT\nmedian", "TPOT\nmedian")
    more, lost = f"at\nx{1 + _headroom(task):g}", f"{'one' if task.spare < 2 else task.spare}\nlost"
    for header in ("cost\nper h" if plan.prices else "GPUs", *latencies, "met\nrate", more, lost):
        table.add_column(header, justify="right", no_wrap=True)
    for costed in plan.carrying:
        candidate = costed.deployment.candidate
        table.add_row(
            ("* " if costed.frontier else "  ") + candidate.device,
            f"{costed.deployment.replicas} x {_short(candidate)}",
            candidate.policy + varied(candidate),
            f"{costed.cost:.2f}" if plan.prices else str(costed.deployment.gpus),
            *_measured(costed),
            style="bold" if costed is plan.carrying[0] else None,
        )
    return table


def _short(candidate: Candidate) -> str:
    """How the GPUs of an instance share the model, in little room: tp2, dp8 ep8 or tp2 dp4 ep8."""
    return candidate.shape.replace("=", "").replace(",", " ")


def _varied_of(plan: DeploymentPlan) -> Callable[[Candidate], str]:
    return _varied([costed.deployment.candidate for costed in plan.carrying])


def _varied(candidates: Sequence[Candidate]) -> Callable[[Candidate], str]:
    """Names B and N of a candidate where the candidates differ in them."""
    if len({(candidate.max_num_batched_tokens, candidate.max_num_seqs) for candidate in candidates}) < 2:
        return lambda _candidate: ""
    return lambda candidate: f" B={candidate.max_num_batched_tokens} N={candidate.max_num_seqs}"


def _headroom(task: PlanTask) -> float:
    """The headroom at which deployments are shown: that asked for, or the usual one."""
    return task.headroom or USUAL_HEADROOM


def _carried(task: PlanTask) -> str:
    """What a deployment was sized for."""
    with_headroom = f"{100 * (1 + task.headroom):g} % of this rate" if task.headroom else "this rate"
    return f"{with_headroom}{f', and this rate with {_lost(task)} lost' if task.spare else ''}"


def _lost(task: PlanTask) -> str:
    return "one replica" if task.spare < 2 else f"{task.spare} replicas"


def _efficiency(plan: DeploymentPlan) -> Table:
    """Speed per user against throughput per GPU, and what tokens and requests cost."""
    varied = _varied_of(plan)
    table = framed()
    table.add_column("  deployment", overflow="fold", min_width=20)
    costs = ("cost per 1M\noutput tok", "cost per\n1,000 req") if plan.prices else ()
    for header in ("GPUs", "tok/s\nper user", "tok/s\nper GPU", *costs):
        table.add_column(header, justify="right", no_wrap=True)
    for costed in plan.carrying:
        candidate = costed.deployment.candidate
        table.add_row(
            f"{'+ ' if costed.efficient else '  '}{costed.deployment.replicas} x {candidate.device} "
            f"{_short(candidate)} {candidate.policy}{varied(candidate)}",
            str(costed.deployment.gpus),
            numbers.rate(costed.tokens_per_s_per_user),
            numbers.rate(costed.tokens_per_s_per_gpu),
            *((f"{_per_million(costed, plan):.3g}", f"{_per_thousand(costed, plan.task):.3g}") if plan.prices else ()),
        )
    return table


def _per_thousand(costed: Costed, task: PlanTask) -> float:
    reading = costed.deployment.reading
    return 1000 * costed.cost / 3600 / (task.rate * (reading.requests_per_session if reading else 1.0))


def _measured(costed: Costed) -> tuple[str, ...]:
    """TTFT, TPOT and shares within the limits: of the whole deployment if it was simulated, else of one replica."""
    if costed.stress is not None:
        stress = costed.stress
        latencies = numbers.duration_ms(stress.ttft_ms), numbers.duration_ms(stress.tpot_ms)
        return *latencies, _level(stress.at_rate), _level(stress.with_headroom), _level(stress.lost)
    reading = costed.deployment.reading
    if reading is None:
        return (numbers.DASH,) * 5
    latencies = numbers.duration_ms(reading.ttft_ms), numbers.duration_ms(reading.tpot_ms)
    return *latencies, f"{100 * reading.attainment:.0f}", numbers.DASH, numbers.DASH


def _level(level: Level | None) -> str:
    if level is None:
        return numbers.DASH
    return "over" if level.overloaded else f"{100 * level.attainment:.0f}"


def _overloads(plan: DeploymentPlan) -> Iterator[str]:
    """What "over" means, where the table has it."""
    stressed = [costed.stress for costed in plan.carrying if costed.stress is not None]
    levels = [level for costed in stressed for level in (costed.at_rate, costed.with_headroom, costed.lost)]
    if any(level is not None and level.overloaded for level in levels):
        yield "over: the queue grows for as long as requests come."


_EFFICIENT = "+: none has as many output tokens/s both per user and per GPU."


def _legend(plan: DeploymentPlan) -> list[str]:
    """What the table of deployments shows."""
    candidate = plan.carrying[0].deployment.candidate
    sizes = f"B = {candidate.max_num_batched_tokens:,} tokens per step, N = {candidate.max_num_seqs:,} sequences."
    return [
        "*: no other deployment shown costs no more and has as low a TTFT and TPOT.",
        f"met: % of the requests sent in the steady window that keep the limits, at the rate, at "
        f"{100 * (1 + _headroom(plan.task)):g} % of it and at the rate with {_lost(plan.task)} lost. "
        "Of the best deployments all replicas are simulated behind a least-outstanding dispatcher, of the others one.",
        *_overloads(plan),
        *([] if _varied_of(plan)(candidate) else [sizes]),
    ]


def _remarks(plan: DeploymentPlan) -> list[str]:
    """The answer, what it does not carry, and what it rests on."""
    best, task = plan.carrying[0], plan.task
    candidate, gpus = best.deployment.candidate, best.deployment.gpus
    return [
        f"Cheapest that carries {_carried(task)}: {best.deployment.replicas} x {candidate.device} "
        f"{candidate.shape} under {candidate.policy}{_varied_of(plan)(candidate)}, "
        f"{gpus} {'GPU' if gpus == 1 else 'GPUs'}"
        + (f", {_per_million(best, plan):.3g} per million output tokens, " if plan.prices else "")
        + (f"{_per_thousand(best, task):.3g} per 1,000 requests." if plan.prices else "."),
        *_weaknesses(best, task),
        *map(numbers.sentence, _caveats(plan)),
    ]


def _weaknesses(best: Costed, task: PlanTask) -> Iterator[str]:
    """The higher loads at which a deployment misses the limits, and the options that size for them."""
    if best.stress is None:
        return
    misses, options = [], []
    if not task.headroom and not best.stress.with_headroom.met:
        misses.append(f"at {100 * (1 + USUAL_HEADROOM):g} % of the rate ({_in_words(best.stress.with_headroom)})")
        options.append(f"--headroom {USUAL_HEADROOM:g}")
    if not task.spare and (best.stress.lost is None or not best.stress.lost.met):
        lost = best.stress.lost
        misses.append("without its only replica" if lost is None else f"with one replica lost ({_in_words(lost)})")
        options.append("--spare 1")
    if not misses:
        return
    more = f"; {best.deployment.replicas + 1} replicas keep them with one lost" if "--spare 1" in options else ""
    size = "sizes" if len(options) == 1 else "size"
    yield f"It misses the limits {' and '.join(misses)}: {' '.join(options)} {size} for that{more}."


def _in_words(level: Level) -> str:
    return "the queue grows without bound" if level.overloaded else f"{100 * level.attainment:.0f} % met"


def _experts(plan: DeploymentPlan) -> list[str]:
    """A note if instances that share experts were possible and not among the candidates."""
    candidates = _all_candidates(plan)
    most = max((candidate.gpus for candidate in candidates), default=1)
    if most == 1 or any(candidate.ep > 1 for candidate in candidates) or not find_model(plan.task.model).experts:
        return []
    return [
        f"No candidate shares experts between its GPUs; --instance tp={most},ep={most} and --instance "
        f"dp={most},ep={most} add such instances."
    ]


def _types(task: PlanTask) -> str:
    """The data types that were asked for."""
    cache = "" if task.spec.server.kv_cache_dtype == "auto" else f", KV cache in {task.spec.server.kv_cache_dtype}"
    return (f", weights in {task.spec.server.quantization}" if task.spec.server.quantization else "") + cache


def _caveats(plan: DeploymentPlan) -> list[str]:
    """What is not measured, and matters, of the deployments shown: each said once, with those it holds for."""
    shown = [costed.deployment.candidate for costed in plan.carrying]
    settings = [
        {"device": candidate.device, "instance": _short(candidate), "policy": candidate.policy} for candidate in shown
    ]
    owner = by_settings(settings, lambda _, values: values, "deployments")
    lines = told_once([_caveats_of(costed, plan.task) for costed in plan.carrying], owner)
    return [f"{line.removesuffix('.')}." for line in lines]


def _caveats_of(costed: Costed, task: PlanTask) -> tuple[RunWarning, ...]:
    return caveats(task.on(costed.deployment.candidate), costed.deployment, costed.stress)


def _per_million(costed: Costed, plan: DeploymentPlan) -> float | None:
    tokens = costed.tokens_per_s_per_gpu * costed.deployment.gpus
    return costed.cost / 3600 / tokens * 1e6 if plan.prices and tokens else None


def as_dict(plan: DeploymentPlan) -> dict[str, Any]:
    """One object: the question, the deployments from cheapest to most expensive, and refused candidates with
    reasons."""
    task = plan.task
    return {
        "workload": task.spec.plan.workload,
        "model": task.model,
        "vllm_version": task.vllm,
        "quantization": task.spec.server.quantization,
        "kv_cache_dtype": task.spec.server.kv_cache_dtype,
        "speculative": task.spec.server.speculative,
        **{name: getattr(task.spec.server, name) for name in ENGINE_ALONE},
        "request_rate": task.rate,
        "scenario": task.scenario,
        "headroom": task.headroom,
        "spare": task.spare,
        "limits": str(task.limits),
        "prices_per_gpu_hour": dict(plan.prices) or None,
        "priced_in": plan.priced_in or None,
        "deployments": [_deployment(costed, plan) for costed in plan.carrying],
        "refused": [{**vars(candidate), "reason": to_builtins(reason)} for candidate, reason in plan.refused],
        "left_out": [vars(candidate) for candidate in plan.pruned],
        "notes": list(plan.notes),
    }


def _deployment(costed: Costed, plan: DeploymentPlan) -> dict[str, Any]:
    reading, stress, task = costed.deployment.reading, costed.stress, plan.task
    return {
        **vars(costed.deployment.candidate),
        "caveats": [said.to_dict(str(said)) for said in _caveats_of(costed, task)],
        "replicas": costed.deployment.replicas,
        "gpus": costed.deployment.gpus,
        "cost_per_hour": costed.cost if plan.prices else None,
        "cost_per_million_output_tokens": _per_million(costed, plan),
        "cost_per_1000_requests": _per_thousand(costed, task) if plan.prices else None,
        "median_ttft_ms": numbers.finite(costed.ttft_ms),
        "median_tpot_ms": numbers.finite(costed.tpot_ms),
        "tokens_per_s_per_user": costed.tokens_per_s_per_user or None,
        "tokens_per_s_per_gpu": costed.tokens_per_s_per_gpu,
        "attainment": reading.attainment if reading else None,
        "whole": vars(stress.at_rate) if stress else None,
        "whole_with_headroom": (vars(stress.with_headroom) | {"headroom": _headroom(task)}) if stress else None,
        "whole_with_replicas_lost": vars(stress.lost) | {"lost": max(1, task.spare)}
        if stress and stress.lost
        else None,
        "on_frontier": costed.frontier,
        "on_efficiency_frontier": costed.efficient,
    }
