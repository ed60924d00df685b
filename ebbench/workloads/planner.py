"""Builds a Plan from PlanOptions, step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from ebbench.errors import UsageError
from ebbench.records.plan import Plan
from ebbench.traffic.schedule import Schedule, make_schedule, phase_rate
from ebbench.traffic.spec import Replay, ScenarioSpec, load_scenario
from ebbench.traffic.substreams import substream
from ebbench.workloads.attachments import parse_adapters, parse_images, with_adapters, with_images
from ebbench.workloads.build import LengthLimits, assemble, phase_requests
from ebbench.workloads.lengths import length_spec
from ebbench.workloads.options import PlanOptions, is_recorded, recorded_file
from ebbench.workloads.requests import Requests, part_of, repeatable
from ebbench.workloads.sessions import session_spec, with_sessions
from ebbench.workloads.shared_prefix import with_shared_prefixes
from ebbench.workloads.sources import Selection, gather
from ebbench.workloads.spec import Profile, WorkloadSpec, load_workload
from ebbench.workloads.trace import read_trace, replayed, sliced


def make_plan(options: PlanOptions) -> Plan:
    """Build the plan. Raises UsageError, InputFileError, RunError."""
    trace = is_recorded(options.workload)
    workload = None if trace else load_workload(options.workload)
    scenario = _scenario(options, workload)
    _check(options, scenario, workload)
    requests, schedule = (
        _from_trace(options, scenario) if workload is None else _from_workload(options, scenario, workload)
    )
    spec = session_spec(None if workload is None else workload.sessions, options.sessions, options.length_distribution)
    if spec is not None:
        requests = with_sessions(requests, spec, options.seed)
    if options.prefixes.asked:
        requests = with_shared_prefixes(requests, options.prefixes, options.seed)
    if options.images is not None:
        requests = with_images(requests, parse_images(options.images))
    if options.lora_assignment is not None:
        requests = with_adapters(requests, parse_adapters(options.lora_assignment), options.seed)
    cap = options.max_concurrency or scenario.max_concurrency
    limits = LengthLimits(options.max_model_len, options.drop_too_long)
    facts = _facts(options, scenario, requests)
    plan = assemble(requests, schedule, limits, cap=cap, seed=options.seed, facts=facts)
    return replace(plan, release_for_s=options.duration_s) if plan.closed_loop else plan


def _scenario(options: PlanOptions, workload: WorkloadSpec | None) -> ScenarioSpec:
    """The scenario asked for; else a trace's own times, a fitted workload's arrivals, or a closed loop.

    What replays a whole trace gives a fitted workload the arrivals that were learned from one.
    """
    own = None if workload is None or workload.fitted is None else workload.fitted.scenario()
    asked = None if options.scenario is None else load_scenario(options.scenario)
    if asked is None:
        return own or load_scenario("trace" if workload is None else "saturated")
    whole = asked.loop == "trace" and asked.replay in (None, Replay())
    return own if own is not None and whole else asked


def _check(options: PlanOptions, scenario: ScenarioSpec, workload: WorkloadSpec | None) -> None:
    """Refuse options without effect. ``workload`` None: a trace."""
    _check_times(options, scenario, trace=workload is None)
    _check_requests(options, scenario, workload)


def _check_times(options: PlanOptions, scenario: ScenarioSpec, *, trace: bool) -> None:
    if scenario.loop == "trace" and not trace:
        own = "a workload log:FILE, or one fitted to a log" if scenario.name == "trace" else "a workload log:FILE"
        raise UsageError(f"scenario {scenario.name!r} replays recorded times; it needs {own}")
    if scenario.loop == "trace" and options.request_rate is not None and (problem := _no_rate(options)):
        raise UsageError(problem)
    if scenario.loop == "open" and options.load.unlimited:
        raise UsageError(f"--request-rate inf releases all at once; leave out --scenario {scenario.name}")
    if scenario.loop != "open" and options.burstiness is not None:
        raise UsageError(f"burstiness shapes the gaps of gamma arrivals; scenario {scenario.name!r} has none")
    if scenario.loop != "trace" and options.speed not in (None, 1.0):
        raise UsageError(f"speed scales recorded times; scenario {scenario.name!r} has none")
    if scenario.loop != "trace" and options.time_unit is not None:
        problem = f"--time-unit is for recorded times; scenario {scenario.name!r} does not use them, leave it out"
        raise UsageError(problem)
    if options.rate_scale is not None and (problem := _unscalable(options, scenario)):
        raise UsageError(problem)
    if options.saturation_rate is not None and options.request_rate is not None:
        raise UsageError("--request-rate and --saturation-rate both set the rate; leave one of them out")
    if options.saturation_rate is not None and all(phase.share is None for phase in scenario.phases):
        raise UsageError(f"scenario {scenario.name!r} has no share of saturation; leave out --saturation-rate")


def _no_rate(options: PlanOptions) -> str:
    """Why a replayed log cannot be given a rate; empty if its recorded times can be scaled to it."""
    if options.load.unlimited:
        return "a replayed log has recorded times; --scenario saturated sends its requests all at once"
    if options.speed is not None:
        return "--request-rate and --speed both scale recorded times; leave one of them out"
    if options.scenario is None:
        rate = f"--request-rate {options.request_rate:g}"
        return (
            f"a log has a rate of its own: {rate} --scenario trace scales its recorded times to it, "
            f"{rate} --scenario poisson takes only its lengths"
        )
    return ""


def _unscalable(options: PlanOptions, scenario: ScenarioSpec) -> str:
    """Why --rate-scale has no effect; empty if it has."""
    if scenario.loop == "trace":
        return "--rate-scale scales rates; a replayed trace has times: use --speed, or fit a workload to it"
    if options.request_rate is not None:
        return "--request-rate and --rate-scale both set the rate; leave one of them out"
    if scenario.loop == "closed" or any(phase.rate is None for phase in scenario.phases):
        return f"--rate-scale scales the rates of a scenario; scenario {scenario.name!r} gives none, leave it out"
    return ""


def _check_requests(options: PlanOptions, scenario: ScenarioSpec, workload: WorkloadSpec | None) -> None:
    trace = workload is None
    if options.lengths_set and (trace or scenario.own_lengths):
        owner = "a trace" if trace else f"scenario {scenario.name!r}"
        raise UsageError(f"{owner} brings its own lengths; leave out --input-len, --output-len and the distribution")
    if trace and options.source not in ("auto", f"file:{options.workload.partition(':')[2]}"):
        raise UsageError(f"a trace is its own source; leave out --source {options.source}")
    if not trace and scenario.own_lengths and options.source not in ("auto", "profile"):
        raise UsageError(f"scenario {scenario.name!r} brings its own lengths; leave out --source {options.source}")
    if not trace and (options.columns is not None or options.keep_text):
        option = "--columns" if options.columns is not None else "--keep-text"
        raise UsageError(f"{option} is for log:FILE; leave it out for {options.workload}")
    if options.prefixes.asked and (trace or (workload is not None and not _draws_lengths(options, scenario, workload))):
        problem = f"--prefix-share and --cache-hit-rate are for synthetic prompts; {options.workload} brings its own"
        raise UsageError(f"{problem}: leave them out" + ("" if trace else ", or add --source profile"))
    if options.tokenizer is not None and (textless := _textless(options, scenario, workload)):
        raise UsageError(f"--tokenizer counts the tokens of texts; {textless} has none, leave it out")


def _draws_lengths(options: PlanOptions, scenario: ScenarioSpec, workload: WorkloadSpec) -> bool:
    """Whether prompts are drawn from distributions, and not read from a data set."""
    return workload.records is None or scenario.own_lengths or options.source == "profile" or options.lengths_set


def _textless(options: PlanOptions, scenario: ScenarioSpec, workload: WorkloadSpec | None) -> str:
    """Name of the source of requests if it has no texts; empty if texts are read."""
    if scenario.own_lengths:
        return f"scenario {scenario.name!r}"
    if workload is None:
        return ""  # a log may have texts; reading it tells
    if workload.records is None:
        return f"workload {workload.name!r}"
    if options.source == "profile":
        return "--source profile"
    return "a plan with lengths set by options" if options.lengths_set else ""


def _from_workload(options: PlanOptions, scenario: ScenarioSpec, workload: WorkloadSpec) -> tuple[Requests, Schedule]:
    default = workload.num_prompts
    schedule = make_schedule(scenario, options.load, options.num_prompts, default, options.seed)
    if scenario.own_lengths:
        return phase_requests(scenario, schedule.sizes, options.seed), schedule
    selection = Selection(
        schedule.sessions, options.seed, options.lengths_set, options.tokenizer, options.with_text,
        _rate_scale(options, scenario, workload), options.redraw,
    )  # fmt: skip
    requests = gather(workload, _profile(options, workload), options.source, selection)
    if requests.sessions < schedule.sessions:
        schedule = make_schedule(scenario, options.load, requests.sessions, default, options.seed)
    return requests, schedule


def _rate_scale(options: PlanOptions, scenario: ScenarioSpec, workload: WorkloadSpec) -> float:
    """Factor of a fitted workload's own rate, by which its lengths change faster, too."""
    own = None if workload.fitted is None else workload.fitted.scenario()
    if own == scenario and options.request_rate is not None:
        return options.request_rate / (own.phases[0].rate or 1.0)
    return options.rate_scale or 1.0


def _from_trace(options: PlanOptions, scenario: ScenarioSpec) -> tuple[Requests, Schedule]:
    path = recorded_file(options.workload)
    assert path is not None  # make_plan checked
    if options.keep_text and not options.with_text:
        raise UsageError("--keep-text sends a log's prompts to a server; this engine reads no texts, leave it out")
    trace = read_trace(path, options.columns, options.tokenizer, keep_text=options.keep_text)
    if scenario.loop == "trace":
        return _replay(options, scenario, trace.timed(options.time_unit))
    requests = trace.requests
    if scenario.own_lengths:
        schedule = make_schedule(scenario, options.load, options.num_prompts, requests.sessions, options.seed)
        return phase_requests(scenario, schedule.sizes, options.seed), schedule
    # The recorded lengths in order, at the scenario's times.
    schedule = make_schedule(scenario, options.load, options.num_prompts, requests.sessions, options.seed)
    asker = "--num-prompts asks" if options.num_prompts is not None else f"scenario {scenario.name} asks"
    requests, sessions, first = _enough(requests, schedule.sessions, options, asker)
    if sessions < schedule.sessions:
        schedule = make_schedule(scenario, options.load, sessions, sessions, options.seed)
    return part_of(requests, sessions, first), schedule


def _replay(options: PlanOptions, scenario: ScenarioSpec, requests: Requests) -> tuple[Requests, Schedule]:
    replay = scenario.replay or Replay()
    if options.speed is not None:
        replay = msgspec.structs.replace(replay, speed=options.speed)
    part = sliced(requests, replay)
    part, asked, first = _enough(part, options.num_prompts or 0, options, "--num-prompts asks", replay.repeat)
    requests = replayed(part, replay, options.request_rate, first + asked)
    requests = part_of(requests, asked or requests.sessions, first)
    if options.duration_s is not None:
        assert requests.arrival_s is not None  # a replay has times
        requests = requests.keep((requests.arrival_s < options.duration_s)[requests.session])
    return requests, Schedule((scenario.name,), (requests.sessions,), arrival_s=requests.arrival_s)


def _enough(
    requests: Requests, asked: int, options: PlanOptions, asker: str, times: int = 1
) -> tuple[Requests, int, int]:
    """A log, with a note if it has too few sessions, how many of those asked for it gives, and the first to take.

    That is its first one, or, where a part is drawn with ``redraw``, one that the seed draws. ``times``: how often
    the scenario repeats it.
    """
    again, have = repeatable(requests), requests.sessions * times
    first, note = 0, ""
    if options.redraw and 0 < asked < have:
        places = have if again else have - asked + 1
        first = int(substream(options.seed, "content/log").integers(places))
        note = f"{asked:,} of the log's {have:,} sessions are taken, from a place that the seed draws"
    elif asked > have and again:
        note = f"{asked:,} sessions are taken from a log of {have:,}: it is read again, each time with new contents"
    elif asked > have:
        note = (
            f"the log holds {have:,} sessions where {asker} for {asked:,}: {have:,} are sent, since a server may have "
            "a text that comes again in its prefix cache"
        )
    facts = {**requests.facts, "log_sessions": requests.sessions}
    requests = replace(requests, facts=facts, warnings=(*requests.warnings, *filter(None, [note])))
    return requests, asked if again else min(asked, have), first


def _profile(options: PlanOptions, workload: WorkloadSpec) -> Profile:
    """The workload's profile with the lengths that the caller set."""
    profile = workload.profile
    if options.input_len is not None or options.length_distribution is not None:
        spec = length_spec(options.input_len or profile.input.mean, options.length_distribution)
        profile = msgspec.structs.replace(profile, input=spec)
    if options.output_len is not None or options.length_distribution is not None:
        spec = length_spec(options.output_len or profile.output.mean, options.length_distribution)
        profile = msgspec.structs.replace(profile, output=spec)
    return profile


def _arrivals(options: PlanOptions, scenario: ScenarioSpec) -> dict[str, Any]:
    """Rates and burstiness in force, set by the caller or by the scenario file."""
    if scenario.loop != "open":
        return {}
    shapes = {phase.burstiness for phase in scenario.phases if phase.process == "gamma"}
    found: dict[str, Any] = {}
    if shapes:
        found["burstiness"] = options.burstiness if options.burstiness is not None else min(shapes)
    if not options.request_rate or len(scenario.phases) > 1:
        found["phase_rates"] = {phase.name: phase_rate(scenario, phase, options.load) for phase in scenario.phases}
    return found


def _count_is_random(options: PlanOptions, scenario: ScenarioSpec) -> bool:
    """Whether the number of sessions depends on the seed."""
    timed = scenario.loop == "open" and any(phase.duration_s is not None for phase in scenario.phases)
    limited = scenario.loop == "open" and options.duration_s is not None
    return (timed and options.num_prompts is None) or limited or options.drop_too_long


def _rate_facts(options: PlanOptions) -> dict[str, Any]:
    if options.load.unlimited:
        return {"all_at_once": True}
    scaled = {"rate_scale": options.rate_scale} if options.rate_scale else {}
    return scaled | ({"request_rate": options.request_rate} if options.request_rate else {})


def _facts(options: PlanOptions, scenario: ScenarioSpec, requests: Requests) -> dict[str, Any]:
    """Facts for the manifest except the counts; only plain values."""
    own = {"source": "scenario", "source_reason": f"{scenario.name} brings its own lengths"}
    return {
        "workload": options.workload,
        "scenario": scenario.name,
        "loop": scenario.loop,
        "seed": options.seed,
        **_rate_facts(options),
        **({"duration_s": options.duration_s} if options.duration_s else {}),
        **({"saturation_rate": options.saturation_rate} if options.saturation_rate else {}),
        **_arrivals(options, scenario),
        **({"sessions_by_seed": True} if _count_is_random(options, scenario) else {}),
        **({**own, **_shape(requests)} if scenario.own_lengths else requests.facts),
    }


def _shape(requests: Requests) -> dict[str, Any]:
    """The facts about sessions and prefixes, which hold whatever the source of the lengths is."""
    names = ("session_shape", "prefix_share", "prefix_groups", "cache_hit_rate", "planned_hit_rate")
    return {name: value for name, value in requests.facts.items() if name in names}
