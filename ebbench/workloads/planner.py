"""Builds a Plan from PlanOptions: requests, arrivals, attachments, and the facts that describe it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ebbench.config.declare import MOST_SECONDS, named_settings, settings_of
from ebbench.errors import RunError, UnknownNameError, UsageError
from ebbench.records.plan import Plan, with_block_tokens
from ebbench.records.schema import PLAN, PLAN_EXTRAS
from ebbench.records.warnings import RunWarning, warning
from ebbench.traffic.arrivals import substream
from ebbench.traffic.lengths import length_spec
from ebbench.traffic.spec import (
    Load,
    Replay,
    ScenarioSpec,
    Schedule,
    closed_phases,
    load_scenario,
    make_schedule,
    phase_rate,
    under,
)
from ebbench.workloads.options import PlanOptions, is_mixture, is_recorded, recorded_file
from ebbench.workloads.requests import (
    Floats,
    ImageSettings,
    Int64s,
    Requests,
    first_sessions,
    int_lists,
    ints,
    repeatable,
    strings,
)
from ebbench.workloads.sessions import (
    begun_before,
    parse_start,
    session_spec,
    with_longest_pause,
    with_sessions,
)
from ebbench.workloads.shared_prefix import with_shared_prefixes
from ebbench.workloads.spec import Profile, Selection, WorkloadSpec, draw_requests, load_workload


def _within(
    requests: Requests, max_model_len: int | None, *, drop_too_long: bool
) -> tuple[Requests, Int64s, tuple[RunWarning, ...]]:
    """Requests of at most ``max_model_len`` tokens, indices of the sessions kept, and warnings. Raises UsageError."""
    everything = np.arange(requests.sessions)
    if max_model_len is None:
        return requests, everything, requests.warnings
    total = requests.input_tokens.astype(np.int64) + requests.output_tokens
    fits = total <= max_model_len
    if fits.all():
        return requests, everything, requests.warnings
    first = int(np.argmin(fits))
    count = int((~fits).sum())
    size = f"{requests.input_tokens[first]} + {requests.output_tokens[first]} tokens"
    name = f"request {_ids(requests)[first].as_py()} ({size})"
    if not drop_too_long:
        raise UsageError(
            f"{name} and {count - 1} more of {len(requests)} do not fit max_model_len {max_model_len}; "
            "raise it, or drop them with --drop-too-long"
        )
    if not fits.any():
        raise UsageError(f"none of the {len(requests)} requests fits max_model_len {max_model_len}; raise it")
    note = warning("too-long-dropped", dropped=count, requests=len(requests), max_model_len=max_model_len)
    return requests.keep(fits), np.unique(requests.session[fits]), (*requests.warnings, note)


def _table(requests: Requests, names: tuple[str, ...], phase: Int64s, arrival_s: Floats | None, seed: int) -> pa.Table:
    n = len(requests)
    arrival_ns = pa.nulls(n, pa.int64())
    if arrival_s is not None:
        ns = np.rint(arrival_s * 1e9).astype(np.int64)
        arrival_ns = ints(ns[requests.session], pa.int64(), valid=requests.turn == 0)
    # Contents of different seeds share no tokens, so that a server's prefix cache does not carry over between seeds.
    base = int(substream(seed, "content/streams").integers(1, 2**30)) << 32
    columns: dict[str, Any] = {
        "request_id": _ids(requests),
        "session": ints(requests.session, pa.int64()),
        "turn": ints(requests.turn, pa.int32()),
        "phase": strings(names).take(ints(phase[requests.session], pa.int64())),
        "arrival_ns": arrival_ns,
        "input_tokens": ints(requests.input_tokens, pa.int32()),
        "output_tokens": ints(requests.output_tokens, pa.int32()),
        "content": ints(requests.streams + base, pa.int64()),
        "hash_ids": pa.nulls(n, PLAN.field("hash_ids").type) if requests.hash_ids is None else requests.hash_ids,
        "prompt": pa.nulls(n, pa.string()) if requests.prompt is None else requests.prompt,
    }
    table = pa.Table.from_arrays([columns[field.name] for field in PLAN], schema=PLAN)
    for name, values in _extras(requests).items():
        table = table.append_column(PLAN_EXTRAS.field(name), values)
    return table if requests.block_tokens is None else with_block_tokens(table, requests.block_tokens)


def _extras(requests: Requests) -> dict[str, pa.Array]:
    """The columns of PLAN_EXTRAS that the requests need."""
    columns: dict[str, pa.Array] = {}
    if requests.pause_s is not None and (known := requests.pause_s > 0).any():
        ns = np.rint(np.where(known, requests.pause_s, 0.0) * 1e9)
        columns["pause_ns"] = ints(ns, pa.int64(), valid=known)
        if requests.tool_share is not None and (known := known & np.isfinite(requests.tool_share)).any():
            tool_ns = np.rint(np.where(known, ns * requests.tool_share, 0.0))
            columns["tool_ns"] = ints(tool_ns, pa.int64(), valid=known)
    if requests.after is not None and any(waits is not None for waits in requests.after):
        columns["after"] = int_lists(requests.after).cast(PLAN_EXTRAS.field("after").type)
    if requests.hang_up_s is not None and (known := np.isfinite(requests.hang_up_s)).any():
        ns = np.rint(np.where(known, requests.hang_up_s, 0.0) * 1e9)
        columns["hang_up_ns"] = ints(ns, pa.int64(), valid=known)
    if requests.thinking_tokens is not None:
        columns["thinking_tokens"] = ints(requests.thinking_tokens, pa.int32())
    if requests.lora is not None:
        columns["lora"] = pa.array(requests.lora, pa.string())
    if requests.images is not None:
        tokens = [None if image is None else [image.tokens] * image.count for image in requests.images]
        columns["image_tokens"] = pa.array(tokens, pa.list_(pa.int32()))
        columns["image_side"] = pa.array(
            [None if image is None else image.side for image in requests.images], pa.int32()
        )
    if requests.classes is not None:
        columns["class"] = pa.array(requests.classes, pa.string())
    if requests.priority is not None:
        columns["priority"] = ints(requests.priority, pa.int32())
    if requests.primed_tokens is not None:
        columns["primed_tokens"] = ints(requests.primed_tokens, pa.int32(), valid=requests.primed_tokens > 0)
    return columns


def _ids(requests: Requests) -> pa.Array:
    """``r000123``, or ``r000123.4`` in multi-turn workloads."""
    number = pc.utf8_lpad(ints(requests.session, pa.int64()).cast(pa.string()), 6, "0")
    ids = pc.utf8_replace_slice(number, 0, 0, "r")
    if not requests.turn.any():
        return ids
    points = strings(["."]).take(ints(np.zeros(len(requests)), pa.int64()))
    return pc.binary_join_element_wise(ids, ints(requests.turn, pa.int32()).cast(pa.string()), points)


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


# LoRA adapters and images of requests: what a request over HTTP carries besides its text.

BASE_MODEL = "base"
"""Stands for the model itself among the names of adapters."""


def parse_adapters(text: str) -> dict[str, float]:
    """Parse ``NAME,NAME=WEIGHT,...`` to weights by name. Raises UsageError."""
    weights: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, weight = part.partition("=")
        try:
            weights[name] = float(weight or 1)
        except ValueError:
            weights[name] = 0.0
        if not name or not 0 < weights[name] < float("inf"):
            raise UsageError(
                f"--lora-assignment {part!r}: write names of adapters as the server serves them, each with a weight "
                f"above 0 if they differ, as in sql=3,chat=1 ({BASE_MODEL}: the model itself)"
            )
    if not weights:
        raise UsageError("--lora-assignment names no adapter; write names as the server serves them, such as sql,chat")
    return weights


def with_adapters(requests: Requests, assignment: str, seed: int) -> Requests:
    """Give each session one of the adapters, drawn by weight; all its requests use it. Raises UsageError."""
    adapters = parse_adapters(assignment)
    names, weights = list(adapters), np.array(list(adapters.values()))
    drawn = substream(seed, "attachments/lora").choice(len(names), requests.sessions, p=weights / weights.sum())
    chosen = [None if name == BASE_MODEL else name for name in names]
    lora = [chosen[place] for place in drawn[requests.session].tolist()]
    facts = {**requests.facts, "lora_assignment": {name: adapters[name] for name in names}}
    return replace(requests, lora=lora, facts=facts)


def with_images(requests: Requests, text: str) -> Requests:
    """Put images, as ``tokens=256,count=2,side=448``, at the beginning of every prompt. Raises UsageError.

    Later turns repeat those of their session.
    """
    given: dict[str, Any] = named_settings(text, settings_of(ImageSettings), "--images")
    if "tokens" not in given:
        raise UsageError("--images needs tokens, what one image is in your model's prompt, as in tokens=256,count=2")
    images = ImageSettings(**given)
    if requests.hash_ids is not None:
        raise UsageError(
            "hash ids (of a trace, --prefix-share or --cache-hit-rate) name the beginnings of these prompts, which "
            "images would shift; leave out --images"
        )
    more = images.count * images.tokens
    described = f"{images.count} of {images.tokens} tokens, {images.side} x {images.side} pixels"
    return replace(
        requests,
        input_tokens=(requests.input_tokens + more).astype(np.int32),
        images=[images] * len(requests),
        facts={**requests.facts, "images": described},
    )


# Statistics of a plan: means, percentiles and the decode share.

PERCENTILES = (5, 50, 95, 99)


def describe(plan: Plan) -> dict[str, Any]:
    """Counts, length statistics in tokens, decode share ``mu_o/(mu_l+mu_o)`` and, for an open loop, the mean rate."""
    inputs = plan.table["input_tokens"].to_numpy()
    outputs = plan.table["output_tokens"].to_numpy()
    total = float(inputs.mean() + outputs.mean())
    described: dict[str, Any] = {
        "requests": len(plan),
        "sessions": len(np.unique(plan.table["session"].to_numpy())),
        "input_tokens": _lengths(inputs),
        "output_tokens": _lengths(outputs),
        "decode_share": float(outputs.mean()) / total,
    }
    if not plan.closed_loop:
        times = plan.table["arrival_ns"].drop_null().to_numpy() / 1e9
        gaps = np.diff(times)
        mean_gap = float(gaps.mean()) if len(gaps) else 0.0
        described["arrivals"] = {
            "duration_s": float(times[-1]),
            "sessions_per_s": 1.0 / mean_gap if mean_gap else 0.0,
            "gap_variation": float(gaps.std()) / mean_gap if mean_gap else 0.0,
        }
    return described


def _lengths(values: Any) -> Mapping[str, float]:
    points = np.percentile(values, PERCENTILES)
    return {
        "mean": float(values.mean()),
        "std": float(values.std()),
        "min": int(values.min()),
        **{f"p{q}": float(point) for q, point in zip(PERCENTILES, points, strict=True)},
        "max": int(values.max()),
    }


def make_plan(options: PlanOptions) -> Plan:
    """Build the plan. Raises UsageError, InputFileError, RunError."""
    requests, schedule, scenario = (_mixed if is_mixture(options.workload) else _single)(options)
    if options.session_start is not None:
        requests = begun_before(requests, parse_start(options.session_start), schedule.concurrency, options.seed)
    facts = _facts(options, scenario, requests)
    requests, kept, warnings = _within(requests, options.max_model_len, drop_too_long=options.drop_too_long)
    phase = schedule.phase_of_session[kept]
    arrival_s = None if schedule.arrival_s is None else schedule.arrival_s[kept]
    if arrival_s is not None and arrival_s.size and arrival_s.max() > MOST_SECONDS:
        years = min(float(arrival_s.max()) / (365 * 86_400), 1e9)
        faster = "--speed" if scenario.loop == "trace" else "rate (requests/s)"
        raise UsageError(f"the last request would come after {years:,.0f} years; give a higher {faster}")
    facts |= {
        "sessions": requests.sessions,
        "requests": len(requests),
        "mean_input_tokens": float(np.mean(requests.input_tokens)),
        "mean_output_tokens": float(np.mean(requests.output_tokens)),
    }
    table = _table(requests, schedule.names, phase, arrival_s, options.seed)
    if arrival_s is not None:
        return Plan(table, (), facts, options.max_concurrency or scenario.max_concurrency, warnings)
    sizes = np.bincount(phase, minlength=len(schedule.names))
    plan = Plan(table, closed_phases(schedule, [int(size) for size in sizes]), facts, None, warnings)
    return replace(plan, release_for_s=options.duration_s) if plan.closed_loop else plan


def _mixed(options: PlanOptions) -> tuple[Requests, Schedule, ScenarioSpec]:
    """The requests of all classes, each from its own workload with its own options, as of :func:`_single`."""
    from ebbench.workloads.mixture import class_options, mixed, read_mixture

    mixture, scenario = read_mixture(options.workload), load_scenario(options.scenario or "saturated")
    assert mixture is not None  # the caller checked
    if scenario.loop == "trace" or scenario.own_lengths:
        own = "replays recorded times" if scenario.loop == "trace" else "brings its own lengths"
        raise UsageError(f"scenario {scenario.name!r} {own}; several workloads take --request-rate, -c or both")
    _check_times(options, scenario, trace=False)
    own_options = [class_options(request_class, options) for request_class in mixture.classes]
    default = mixture.num_prompts or mixture.most([_sessions_held(of_class) for of_class in own_options])
    schedule = make_schedule(scenario, options.load, options.num_prompts, default, options.seed)
    counts, parts = mixture.counts(schedule.sessions), []
    for request_class, of_class, count in zip(mixture.classes, own_options, counts, strict=True):
        try:
            parts.append(_single(replace(of_class, num_prompts=count), load_scenario("saturated"))[0])
        except UsageError as error:
            raise UsageError(f"class {request_class.name}: {error}") from None
    have = [part.sessions for part in parts]
    if have != counts:  # a data set has texts for no more
        schedule = make_schedule(scenario, options.load, mixture.most(have), default, options.seed)
        parts = [
            first_sessions(request_class, count)
            for request_class, count in zip(parts, mixture.counts(schedule.sessions), strict=True)
        ]
    return mixed(mixture, parts, options.seed, options.priorities), schedule, scenario


def _sessions_held(options: PlanOptions) -> int:
    """Sessions that a workload holds, or plans by default."""
    path = recorded_file(options.workload)
    if path is None:
        return load_workload(options.workload).num_prompts
    from ebbench.workloads.trace import read_trace

    return read_trace(path, options.columns, options.tokenizer, keep_text=options.keep_text).requests.sessions


def _single(options: PlanOptions, scenario: ScenarioSpec | None = None) -> tuple[Requests, Schedule, ScenarioSpec]:
    """The requests of a single workload, when they are released, and the scenario that says so (None: its own)."""
    workload = None if is_recorded(options.workload) else load_workload(options.workload)
    scenario = scenario or _scenario(options, workload)
    _check_times(options, scenario, trace=workload is None)
    _check_requests(options, scenario, workload)
    requests, schedule = (
        _from_trace(options, scenario) if workload is None else _from_workload(options, scenario, workload)
    )
    spec = session_spec(None if workload is None else workload.sessions, options)
    if spec is not None:
        requests = with_sessions(requests, spec, options.seed)
    if options.max_pause_s is not None:
        requests = with_longest_pause(requests, options.max_pause_s)
    if options.shares_prefixes:
        requests = with_shared_prefixes(requests, options)
    if options.images is not None:
        requests = with_images(requests, options.images)
    if options.lora_assignment is not None:
        requests = with_adapters(requests, options.lora_assignment, options.seed)
    if options.priorities is not None:
        from ebbench.workloads.mixture import parse_priorities, with_priorities

        requests = with_priorities(requests, parse_priorities(options.priorities))
    return requests, schedule, scenario


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
    if scenario.loop != "trace" and options.time_unit is not None and not options.recorded_pauses:
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
            f"a log has a rate of its own: leave {rate} out to replay it; {rate} --scenario trace scales its recorded "
            f"times to it, {rate} --scenario poisson takes only its lengths"
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
    if options.recorded_pauses and scenario.loop == "trace":
        raise UsageError("--recorded-pauses: a replay at recorded times keeps them anyway; leave it out")
    if not trace and (options.columns is not None or options.keep_text or options.recorded_pauses):
        option = "--recorded-pauses" if options.recorded_pauses else "--keep-text"
        option = "--columns" if options.columns is not None else option
        raise UsageError(f"{option} is for log:FILE; leave it out for {options.workload}")
    drawn = scenario.own_lengths or options.source == "profile" or options.lengths_set
    if options.shares_prefixes and (workload is None or (workload.records is not None and not drawn)):
        problem = f"--prefix-share and --cache-hit-rate are for synthetic prompts; {options.workload} brings its own"
        raise UsageError(f"{problem}: leave them out" + ("" if trace else ", or add --source profile"))
    unused = options.tokenizer is not None and not options.counts_answers
    if unused and (textless := _textless(options, scenario, workload)):
        raise UsageError(f"--tokenizer counts the tokens of texts; {textless} has none, leave it out")


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
    own = None if workload.fitted is None else workload.fitted.scenario()
    if own == scenario and options.request_rate is not None:
        rate_scale = options.request_rate / (own.phases[0].rate or 1.0)
    else:
        rate_scale = options.rate_scale or 1.0
    selection = Selection(
        schedule.sessions, options.seed, options.lengths_set, options.tokenizer, options.with_text, rate_scale,
        options.redraw,
    )  # fmt: skip
    profile = workload.profile
    if options.input_len is not None or options.length_distribution is not None:
        spec = length_spec(options.input_len or profile.input.mean, options.length_distribution)
        profile = msgspec.structs.replace(profile, input=spec)
    if options.output_len is not None or options.length_distribution is not None:
        spec = length_spec(options.output_len or profile.output.mean, options.length_distribution)
        profile = msgspec.structs.replace(profile, output=spec)
    requests = _gather(workload, profile, options.source, selection)
    if requests.sessions < schedule.sessions:
        schedule = make_schedule(scenario, options.load, requests.sessions, default, options.seed)
    return requests, schedule


def _from_trace(options: PlanOptions, scenario: ScenarioSpec) -> tuple[Requests, Schedule]:
    path = recorded_file(options.workload)
    assert path is not None  # make_plan checked
    if options.keep_text and not options.with_text:
        raise UsageError("--keep-text sends a log's prompts to a server; this engine reads no texts, leave it out")
    from ebbench.workloads.trace import read_trace

    trace = read_trace(path, options.columns, options.tokenizer, keep_text=options.keep_text)
    if scenario.loop == "trace":
        return _replay(options, scenario, trace.timed(options.time_unit))
    requests = trace.requests
    if options.recorded_pauses:
        requests = replace(trace.timed(options.time_unit), arrival_s=None)
        if requests.pause_s is None:
            raise UsageError(f"--recorded-pauses: {path} has no sessions whose requests' ends are known; leave it out")
    if scenario.own_lengths:
        schedule = make_schedule(scenario, options.load, options.num_prompts, requests.sessions, options.seed)
        return phase_requests(scenario, schedule.sizes, options.seed), schedule
    # The recorded lengths in order, at the scenario's times.
    schedule = make_schedule(scenario, options.load, options.num_prompts, requests.sessions, options.seed)
    asker = "--num-prompts asks" if options.num_prompts is not None else f"scenario {scenario.name} asks"
    requests, sessions, first = _repeat_log(requests, schedule.sessions, options, asker)
    if sessions < schedule.sessions:
        schedule = make_schedule(scenario, options.load, sessions, sessions, options.seed)
    return first_sessions(requests, sessions, first), schedule


def _replay(options: PlanOptions, scenario: ScenarioSpec, requests: Requests) -> tuple[Requests, Schedule]:
    from ebbench.workloads.trace import replayed, sliced

    replay = scenario.replay or Replay()
    if options.speed is not None:
        replay = msgspec.structs.replace(replay, speed=options.speed)
    part = sliced(requests, replay)
    part, asked, first = _repeat_log(part, options.num_prompts or 0, options, "--num-prompts asks", replay.repeat)
    requests = replayed(part, replay, options.request_rate, first + asked)
    requests = first_sessions(requests, asked or requests.sessions, first)
    if options.duration_s is not None:
        assert requests.arrival_s is not None  # a replay has times
        requests = requests.keep((requests.arrival_s < options.duration_s)[requests.session])
    return requests, Schedule((scenario.name,), (requests.sessions,), arrival_s=requests.arrival_s)


def _repeat_log(
    requests: Requests, asked: int, options: PlanOptions, asker: str, times: int = 1
) -> tuple[Requests, int, int]:
    """A log, with a note if it has too few sessions, how many of those asked for it gives, and the first to take.

    That is its first one, or, where a part is drawn with ``redraw``, one that the seed draws. ``times``: how often
    the scenario repeats it.
    """
    again, have = repeatable(requests), requests.sessions * times
    first = 0
    note: RunWarning | None = None
    if options.redraw and 0 < asked < have:
        places = have if again else have - asked + 1
        first = int(substream(options.seed, "content/log").integers(places))
        note = warning("part-of-log", sessions=asked, log_sessions=have)
    elif asked > have and again:
        note = warning("log-read-again", sessions=asked, log_sessions=have)
    elif asked > have:
        note = warning("log-too-short", sessions=asked, log_sessions=have, asker=asker)
    facts = {**requests.facts, "log_sessions": requests.sessions}
    requests = replace(requests, facts=facts, warnings=(*requests.warnings, *filter(None, [note])))
    return requests, asked if again else min(asked, have), first


def _facts(options: PlanOptions, scenario: ScenarioSpec, requests: Requests) -> dict[str, Any]:
    """Facts for the manifest except the counts; only plain values."""
    facts: dict[str, Any] = {
        "workload": options.workload,
        "scenario": scenario.name,
        "loop": scenario.loop,
        "seed": options.seed,
    }
    if options.load.unlimited:
        facts["all_at_once"] = True
    set_rates = () if options.load.unlimited else ("rate_scale", "request_rate")
    names = (*set_rates, "duration_s", "saturation_rate")
    facts |= {name: value for name in names if (value := getattr(options, name))}
    if scenario.loop == "open":
        if shapes := {phase.burstiness for phase in scenario.phases if phase.process == "gamma"}:
            facts["burstiness"] = options.burstiness if options.burstiness is not None else min(shapes)
        if not options.request_rate or len(scenario.phases) > 1:
            facts["phase_rates"] = {phase.name: phase_rate(scenario, phase, options.load) for phase in scenario.phases}
    timed = scenario.loop == "open" and any(phase.duration_s is not None for phase in scenario.phases)
    limited = scenario.loop == "open" and options.duration_s is not None
    if (timed and options.num_prompts is None) or limited or options.drop_too_long:
        facts["sessions_by_seed"] = True
    if not scenario.own_lengths:
        return {**facts, **requests.facts}
    # What holds whatever the source of the lengths is.
    kept = ("session_shape", "prefix_share", "prefix_groups", "cache_hit_rate", "planned_hit_rate")
    facts |= {"source": "scenario", "source_reason": f"{scenario.name} brings its own lengths"}
    return facts | {name: value for name, value in requests.facts.items() if name in kept}


def laid_out(
    name: str, spec: ScenarioSpec, given: Load, num_prompts: int | None, seed: int
) -> tuple[ScenarioSpec, dict[str, float] | None]:
    """The scenario as a run would use it, and the arrivals of an open loop. Raises what a run would raise."""
    if spec.loop == "trace":
        raise UsageError(f"scenario {spec.name!r} replays recorded times; see `ebbench workloads show log:FILE`")
    plan = make_plan(
        PlanOptions(
            "balanced", name, num_prompts=num_prompts, seed=seed, request_rate=given.request_rate,
            saturation_rate=given.saturation_rate,
        )
    )  # fmt: skip
    return under(spec, given, num_prompts, seed), describe(plan).get("arrivals")


def _gather(workload: WorkloadSpec, profile: Profile, source: str, selection: Selection) -> Requests:
    """Requests from ``source`` (auto, hub, file:PATH, profile); their facts name the source and the reason.

    Raises UsageError, InputFileError, RunError (``hub`` that cannot be read).
    """
    _check_source(workload, source, selection)
    if source.startswith("file:"):
        from ebbench.workloads.data_sets import from_file

        return from_file(workload, Path(source.removeprefix("file:")).expanduser(), selection)
    if source != "hub" and workload.fitted is not None and not selection.lengths_set:
        from ebbench.workloads.fitted import draw_fitted

        facts = {"source": "fitted", "source_reason": f"distributions in the file of {workload.name}"}
        drawn = draw_fitted(workload.fitted, selection.sessions, selection.seed, selection.rate_scale)
        return replace(drawn, facts=facts)
    if source == "profile":
        return _from_profile(profile, selection, "asked for")
    if workload.records is None:
        return _from_profile(profile, selection, "synthetic workload")
    if selection.lengths_set:
        return _from_profile(profile, selection, "lengths were set")
    if workload.hub is None:  # which _check_source refuses for source hub
        return _from_profile(profile, selection, "the workload's file names no data set on the hub")
    from ebbench.workloads.data_sets import UnreadableError, read_hub

    try:
        return read_hub(workload, selection)
    except UnreadableError as error:
        if source == "hub":
            remedy = "use --source profile for lengths from published statistics, or file:PATH"
            raise RunError(f"--source hub: {error}; {remedy}") from None
        published = warning("published-lengths", workload=workload.name, why=str(error))
        return _from_profile(profile, selection, str(error), (published,))


def _check_source(workload: WorkloadSpec, source: str, selection: Selection) -> None:
    kind = "file" if source.startswith("file:") else source
    if kind not in ("auto", "hub", "file", "profile") or source == "file:":
        raise UnknownNameError("source", source, ["auto", "hub", "file:PATH", "profile"])
    if kind not in ("hub", "file"):
        return
    if workload.records is None or (kind == "hub" and workload.hub is None):
        missing = "[records]" if workload.records is None else "[hub]"
        raise UsageError(f"workload {workload.name!r} has no {missing} in its file; leave out --source {source}")
    if selection.lengths_set:
        raise UsageError(f"lengths cannot be set for the records of --source {source}; leave one of them out")


def _from_profile(
    profile: Profile, selection: Selection, reason: str, warnings: tuple[RunWarning, ...] = ()
) -> Requests:
    requests = draw_requests(profile, selection.sessions, selection.seed)
    facts = {
        "source": "profile",
        "source_reason": reason,
        "input_lengths": profile.input.text,
        "output_lengths": profile.output.text,
    }
    return replace(requests, facts=facts, warnings=warnings)
