"""The result of ``ebbench plan`` as a table, as sentences and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import to_builtins
from rich.table import Column, Table

from ebbench.analysis.validity import by_settings, told_once
from ebbench.config.declare import DEFAULT_MODEL, DEFAULT_VLLM, option_name
from ebbench.devices.profiles import find_model
from ebbench.grouping import by_key
from ebbench.records.warnings import RunWarning, Texts, counted
from ebbench.render import numbers
from ebbench.render.tables import framed
from ebbench.sizing.choose import Costed, DeploymentChoice, DeploymentPlan
from ebbench.sizing.deployments import (
    NOISE,
    USUAL_HEADROOM,
    WITHIN,
    Candidate,
    Demand,
    Level,
    caveats,
    run_of,
)
from ebbench.spec.run import RunSpec
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
    choice, demand, spec = plan.deployments, plan.demand, plan.spec
    lines: list[Table | str] = [
        f"{_model(spec)}, {spec.plan.workload}: {demand.rate:g} sessions/s within {demand.limits}. Simulated on device "
        f"models that hold as much KV cache as vLLM {_version(spec)}{_types(spec.server)}{_in_front(spec.server)}; "
        "reports/fidelity/ has the error of each."
    ]
    if choice.carrying:
        lines += ["", _table(plan), *_legend(choice, demand)]
        lines += ["", _efficiency(plan), _EFFICIENT]
        lines += [f"Prices in {plan.priced_in}."] if plan.priced_in else []
        lines += ["", *_remarks(plan), ""]
    else:
        lines.append(f"No candidate carries {_carried(demand)}{',' if demand.spare else ''} within the limits.")
    lines += _experts(choice, _model(spec))
    if choice.unbounded:
        lines.append(
            "The workload has too few sessions to fill a batch, so no saturated rate bounds the number of replicas: "
            "near saturation a queue may grow too slowly for runs of this length to show it."
        )
    reasons = by_key((reason.worded(REFUSALS), candidate) for candidate, reason in choice.refused)
    lines += [
        f"{counted(len(candidates), 'candidate')} left out: {reason} ({_names(candidates, choice)})."
        for reason, candidates in sorted(reasons.items(), key=lambda item: -len(item[1]))
    ]
    if choice.pruned:
        lines.append(
            f"{counted(len(choice.pruned), 'candidate')} left out: at their saturated rate, which no load within "
            f"limits exceeds ({100 * (NOISE - 1):.0f} % added for noise), or as sized, they cost more than {WITHIN:g} "
            f"times the cheapest ({_names(choice.pruned, choice)})."
        )
    return [*lines, *map(numbers.sentence, plan.notes)]


def _model(spec: RunSpec) -> str:
    return spec.model or DEFAULT_MODEL


def _version(spec: RunSpec) -> str:
    """The version by whose rules the KV caches are sized."""
    return spec.server.vllm_version or DEFAULT_VLLM


def _names(candidates: Sequence[Candidate], choice: DeploymentChoice) -> str:
    """``l40s tp1, h100 tp1 tp2 (v1)``: the policies where not all candidates of a device and shape are named."""
    all_policies = _policies(_all_candidates(choice))
    by_device = by_key(
        ((device, "" if policies == all_policies.get((device, shape)) else f" ({', '.join(policies)})"), shape)
        for (device, shape), policies in _policies(candidates).items()
    )
    return ", ".join(f"{device} {' '.join(shapes)}{named}" for (device, named), shapes in by_device.items())


def _policies(candidates: Iterable[Candidate]) -> dict[tuple[str, str], list[str]]:
    """The policies, with B and N where they differ, of each device and shape."""
    candidates = list(candidates)
    varied = _varied(candidates)
    candidates.sort(key=lambda candidate: (candidate.device, candidate.gpus, candidate.policy, varied(candidate)))
    return by_key(((c.device, _short(c)), c.policy + varied(c)) for c in candidates)


def _all_candidates(choice: DeploymentChoice) -> list[Candidate]:
    return [
        *(entry.deployment.candidate for entry in choice.carrying),
        *(entry for entry, _ in choice.refused),
        *choice.pruned,
    ]


def _in_front(server: EngineOptions) -> str:
    """What of a replica's front end was asked for."""
    asked = {name: getattr(server, name) for name in ENGINE_ALONE}
    words = [f"{option_name(name)} {asked[name]}" for name in asked if asked[name] != getattr(EngineOptions, name)]
    return f", {' '.join(words)}" if words else ""


def _table(plan: DeploymentPlan) -> Table:
    choice, demand, prices = plan.deployments, plan.demand, plan.prices
    varied = _varied_of(choice)
    more, lost = f"at\nx{1 + _headroom(demand):g}", f"{'one' if demand.spare < 2 else demand.spare}\nlost"
    table = framed(
        Column("  device", no_wrap=True), Column("", no_wrap=True), Column("policy", overflow="fold", min_width=8),
        right=("cost\nper h" if prices else "GPUs", "TTFT\nmedian", "TPOT\nmedian", "met\nrate", more, lost),
    )  # fmt: skip
    for costed in choice.carrying:
        candidate = costed.deployment.candidate
        table.add_row(
            ("* " if costed.frontier else "  ") + candidate.device,
            f"{costed.deployment.replicas} x {_short(candidate)}",
            candidate.policy + varied(candidate),
            f"{costed.cost:.2f}" if prices else str(costed.deployment.gpus),
            *_measured(costed),
            style="bold" if costed is choice.carrying[0] else None,
        )
    return table


def _short(candidate: Candidate) -> str:
    """How the GPUs of an instance share the model, in little room: tp2, dp8 ep8 or tp2 dp4 ep8."""
    return candidate.shape.replace("=", "").replace(",", " ")


def _varied_of(choice: DeploymentChoice) -> Callable[[Candidate], str]:
    return _varied([costed.deployment.candidate for costed in choice.carrying])


def _varied(candidates: Sequence[Candidate]) -> Callable[[Candidate], str]:
    """Names B and N of a candidate where the candidates differ in them."""
    if len({(candidate.max_num_batched_tokens, candidate.max_num_seqs) for candidate in candidates}) < 2:
        return lambda _candidate: ""
    return lambda candidate: f" B={candidate.max_num_batched_tokens} N={candidate.max_num_seqs}"


def _headroom(demand: Demand) -> float:
    """The headroom at which deployments are shown: that asked for, or the usual one."""
    return demand.headroom or USUAL_HEADROOM


def _carried(demand: Demand) -> str:
    with_headroom = f"{100 * (1 + demand.headroom):g} % of this rate" if demand.headroom else "this rate"
    return f"{with_headroom}{f', and this rate with {_lost(demand)} lost' if demand.spare else ''}"


def _lost(demand: Demand) -> str:
    return "one replica" if demand.spare < 2 else f"{demand.spare} replicas"


def _efficiency(plan: DeploymentPlan) -> Table:
    """Speed per user against throughput per GPU, and what tokens and requests cost."""
    choice, prices = plan.deployments, plan.prices
    varied = _varied_of(choice)
    costs = ("cost per 1M\noutput tok", "cost per\n1,000 req") if prices else ()
    figures = ("GPUs", "tok/s\nper user", "tok/s\nper GPU", *costs)
    table = framed(Column("  deployment", overflow="fold", min_width=20), right=figures)
    for costed in choice.carrying:
        candidate = costed.deployment.candidate
        table.add_row(
            f"{'+ ' if costed.efficient else '  '}{costed.deployment.replicas} x {candidate.device} "
            f"{_short(candidate)} {candidate.policy}{varied(candidate)}",
            str(costed.deployment.gpus),
            numbers.rate(costed.tokens_per_s_per_user),
            numbers.rate(costed.tokens_per_s_per_gpu),
            *((f"{_per_million(costed, prices):.3g}", f"{_per_thousand(costed, plan.demand):.3g}") if prices else ()),
        )
    return table


def _per_thousand(costed: Costed, demand: Demand) -> float:
    reading = costed.deployment.reading
    return 1000 * costed.cost / 3600 / (demand.rate * (reading.requests_per_session if reading else 1.0))


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


def _overloads(choice: DeploymentChoice) -> Iterator[str]:
    """What "over" means, where the table has it."""
    stressed = [costed.stress for costed in choice.carrying if costed.stress is not None]
    levels = [level for costed in stressed for level in (costed.at_rate, costed.with_headroom, costed.lost)]
    if any(level is not None and level.overloaded for level in levels):
        yield "over: the queue grows for as long as requests come."


_EFFICIENT = "+: none has as many output tokens/s both per user and per GPU."


def _legend(choice: DeploymentChoice, demand: Demand) -> list[str]:
    candidate = choice.carrying[0].deployment.candidate
    sizes = f"B = {candidate.max_num_batched_tokens:,} tokens per step, N = {candidate.max_num_seqs:,} sequences."
    return [
        "*: no other deployment shown costs no more and has as low a TTFT and TPOT.",
        f"met: % of the requests sent in the steady window that keep the limits, at the rate, at "
        f"{100 * (1 + _headroom(demand)):g} % of it and at the rate with {_lost(demand)} lost. "
        "Of the best deployments all replicas are simulated behind a least-outstanding dispatcher, of the others one.",
        *_overloads(choice),
        *([] if _varied_of(choice)(candidate) else [sizes]),
    ]


def _remarks(plan: DeploymentPlan) -> list[str]:
    """The answer, what it does not carry, and what it rests on."""
    choice, demand, prices = plan.deployments, plan.demand, plan.prices
    best = choice.carrying[0]
    candidate, gpus = best.deployment.candidate, best.deployment.gpus
    return [
        f"Cheapest that carries {_carried(demand)}: {best.deployment.replicas} x {candidate.device} "
        f"{candidate.shape} under {candidate.policy}{_varied_of(choice)(candidate)}, "
        f"{gpus} {'GPU' if gpus == 1 else 'GPUs'}"
        + (f", {_per_million(best, prices):.3g} per million output tokens, " if prices else "")
        + (f"{_per_thousand(best, demand):.3g} per 1,000 requests." if prices else "."),
        *_weaknesses(best, demand),
        *map(numbers.sentence, _caveats(choice, plan.spec)),
    ]


def _weaknesses(best: Costed, demand: Demand) -> Iterator[str]:
    """The higher loads at which a deployment misses the limits, and the options that size for them."""
    if best.stress is None:
        return
    misses, options = [], []
    if not demand.headroom and not best.stress.with_headroom.met:
        misses.append(f"at {100 * (1 + USUAL_HEADROOM):g} % of the rate ({_in_words(best.stress.with_headroom)})")
        options.append(f"--headroom {USUAL_HEADROOM:g}")
    if not demand.spare and (best.stress.lost is None or not best.stress.lost.met):
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


def _experts(choice: DeploymentChoice, model: str) -> list[str]:
    """A note if instances that share experts were possible and not among the candidates."""
    candidates = _all_candidates(choice)
    most = max((candidate.gpus for candidate in candidates), default=1)
    if most == 1 or any(candidate.ep > 1 for candidate in candidates) or not find_model(model).experts:
        return []
    return [
        f"No candidate shares experts between its GPUs; --instance tp={most},ep={most} and --instance "
        f"dp={most},ep={most} add such instances."
    ]


def _types(server: EngineOptions) -> str:
    """The data types and kernels that were asked for."""
    cache = "" if server.kv_cache_dtype == "auto" else f", KV cache in {server.kv_cache_dtype}"
    kernels = "" if server.moe_backend == "auto" else f", experts by {server.moe_backend}'s kernels"
    return (f", weights in {server.quantization}" if server.quantization else "") + cache + kernels


def _caveats(choice: DeploymentChoice, spec: RunSpec) -> list[str]:
    """What is not measured, and matters, of the deployments shown: each said once, with those it holds for."""
    shown = [costed.deployment.candidate for costed in choice.carrying]
    settings = [
        {"device": candidate.device, "instance": _short(candidate), "policy": candidate.policy} for candidate in shown
    ]
    owner = by_settings(settings, lambda _, values: values, "deployments")
    lines = told_once([_caveats_of(costed, spec) for costed in choice.carrying], owner)
    return [f"{line.removesuffix('.')}." for line in lines]


def _caveats_of(costed: Costed, spec: RunSpec) -> tuple[RunWarning, ...]:
    return caveats(run_of(costed.deployment.candidate, spec), costed.deployment, costed.stress)


def _per_million(costed: Costed, prices: Mapping[str, float]) -> float | None:
    tokens = costed.tokens_per_s_per_gpu * costed.deployment.gpus
    return costed.cost / 3600 / tokens * 1e6 if prices and tokens else None


def as_dict(plan: DeploymentPlan) -> dict[str, Any]:
    """One object: the question, the deployments from cheapest to most expensive, and refused candidates with
    reasons."""
    choice, demand, spec = plan.deployments, plan.demand, plan.spec
    return {
        "workload": spec.plan.workload,
        "model": _model(spec),
        "vllm_version": _version(spec),
        **{
            name: getattr(spec.server, name)
            for name in ("quantization", "kv_cache_dtype", "moe_backend", "speculative", *ENGINE_ALONE)
        },
        "request_rate": demand.rate,
        "scenario": spec.plan.scenario or "poisson",
        "headroom": demand.headroom,
        "spare": demand.spare,
        "limits": str(demand.limits),
        "prices_per_gpu_hour": dict(plan.prices) or None,
        "priced_in": plan.priced_in or None,
        "deployments": [_deployment(costed, plan) for costed in choice.carrying],
        "refused": [{**vars(candidate), "reason": to_builtins(reason)} for candidate, reason in choice.refused],
        "left_out": [vars(candidate) for candidate in choice.pruned],
        "notes": list(plan.notes),
    }


def _deployment(costed: Costed, plan: DeploymentPlan) -> dict[str, Any]:
    demand, prices = plan.demand, plan.prices
    reading, stress = costed.deployment.reading, costed.stress
    return {
        **vars(costed.deployment.candidate),
        "caveats": [said.to_dict(str(said)) for said in _caveats_of(costed, plan.spec)],
        "replicas": costed.deployment.replicas,
        "gpus": costed.deployment.gpus,
        "cost_per_hour": costed.cost if prices else None,
        "cost_per_million_output_tokens": _per_million(costed, prices),
        "cost_per_1000_requests": _per_thousand(costed, plan.demand) if prices else None,
        "median_ttft_ms": numbers.finite(costed.ttft_ms),
        "median_tpot_ms": numbers.finite(costed.tpot_ms),
        "tokens_per_s_per_user": costed.tokens_per_s_per_user or None,
        "tokens_per_s_per_gpu": costed.tokens_per_s_per_gpu,
        "attainment": reading.attainment if reading else None,
        "whole": vars(stress.at_rate) if stress else None,
        "whole_with_headroom": (vars(stress.with_headroom) | {"headroom": _headroom(demand)}) if stress else None,
        "whole_with_replicas_lost": vars(stress.lost) | {"lost": max(1, demand.spare)}
        if stress and stress.lost
        else None,
        "on_frontier": costed.frontier,
        "on_efficiency_frontier": costed.efficient,
    }
