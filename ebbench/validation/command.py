"""The steps of ``ebbench validate``: announce, predict and measure, judge, store the result, show it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.text import Text

from ebbench.analysis.documents import Column, Document, Section, labels
from ebbench.engines.machine import machine_name
from ebbench.errors import DataError, InterruptedRunError, UsageError
from ebbench.records import files
from ebbench.records.files import sole_use
from ebbench.records.manifest import wall_clock_ns
from ebbench.records.run import VALIDATION
from ebbench.render.documents import Console, as_markdown, as_rich
from ebbench.render.live import Work, shown
from ebbench.render.numbers import finite
from ebbench.validation.drive import Outcomes, validate
from ebbench.validation.judge import METRICS, GainPrediction, Judgement, MetricVerdict, judge
from ebbench.validation.machine import Call, describe_machine, write_manifest
from ebbench.validation.question import StepTimes, TimeBudget, ValidationQuestion

# The result of a validation as one JSON object, and as a document with tables.

FORMAT = 2
TITLE = "Predicted against measured"


def as_dict(
    question: ValidationQuestion, outcomes: Outcomes, judged: Judgement, machine: Mapping[str, Any]
) -> dict[str, Any]:
    """The whole result. Shares as fractions of 1, times in the units of their names; None: unknown."""
    steps = [
        {name: value for name, value in asdict(entry).items() if name not in ("profile", "costs")}
        | {"slowness": entry.slowness(outcomes.steps[0])}
        for entry in outcomes.steps
    ]
    return {
        "format": FORMAT,
        "verdict": judged.word,
        "sentence": judged.sentence,
        "directions": {"right": judged.directions_right, "clear": judged.directions_clear},
        "metrics": [finite(asdict(entry)) for entry in judged.metrics],
        "errors": [finite(asdict(error)) for error in judged.errors],
        "gains": [finite(asdict(gain)) for gain in judged.gains],
        "runs": {
            "planned": outcomes.planned,
            "measured": len(outcomes.observations),
            "invalid": outcomes.invalid,
            "rounds": outcomes.schedule.rounds,
            "requests": dict(zip(map(str, question.loads), outcomes.schedule.requests, strict=True)),
            "stopped": outcomes.stopped,
        },
        "step_times": steps,
        "observations": [asdict(entry) for entry in outcomes.observations],
        "machine": dict(machine),
    }


def as_document(
    question: ValidationQuestion, outcomes: Outcomes, judged: Judgement, machine: Mapping[str, Any],
    load_average: Sequence[float],
) -> Document:  # fmt: skip
    """Tables of errors by metric and of gains, with notes. ``machine``: from :func:`.machine.describe_machine`.
    ``load_average``: samples taken during the measurement."""
    sections = [_errors(METRICS[metric], judged, metric) for metric in METRICS]
    sections.append(_gains(question, judged.gains))
    title = f"{TITLE}: {question.model} on {machine['name']}"
    lines = notes(question, outcomes, judged)
    cpus, server_cpus = machine["usable_cpus"], machine["server_cpus"]
    if server_cpus < cpus:
        lines.append(f"vLLM ran on {server_cpus} of {cpus} processors, so that the client kept its schedule")
    if machine["cpu_build"]:
        lines.append(
            "vLLM's CPU build ran the model in the engine core's process, eager (--enforce-eager), as its steps were "
            "measured; a server started by hand uses a process more and torch.compile"
        )
    if question.real and load_average:
        lines.append(
            f"load average {min(load_average):.1f} to {max(load_average):.1f} on {cpus} CPUs during the measurement"
        )
    return Document("validation", title, tuple(filter(None, sections)), tuple(lines))


def _errors(name: str, judged: Judgement, metric: str) -> Section | None:
    rows = [
        (e.policy, e.load, e.predicted, e.measured, e.lowest, e.highest, e.error, plus_minus(e.uncertainty))
        for e in judged.errors
        if e.metric == metric
    ]
    if not rows:
        return None
    unit = "output tokens/s" if metric == "output_throughput" else "ms, median over requests"
    columns = (
        *labels("policy"), Column("open"), Column("predicted"), Column("measured", ours=True), Column("lowest"),
        Column("highest"), Column("error", "change"), Column("noise", "label", right=True),
    )  # fmt: skip
    return Section(f"{name} ({unit})", columns, tuple(rows))


def plus_minus(uncertainty: float) -> str:
    """A share as ±3.1 %; ``unknown`` if no run was repeated."""
    return f"±{100 * uncertainty:.1f} %" if math.isfinite(uncertainty) else "unknown"


def _gains(question: ValidationQuestion, gains: Sequence[GainPrediction]) -> Section | None:
    if not gains:
        return None
    columns = (
        *labels("policy"), Column("open"), Column("predicted", "change"), Column("measured", "change", ours=True),
        Column("noise", "label", right=True), Column("direction", "label"),
    )  # fmt: skip
    words = {True: "right", False: "WRONG", None: "too close to tell"}
    rows = tuple(
        (gain.policy, gain.load, gain.predicted, gain.measured, plus_minus(gain.uncertainty), words[gain.right])
        for gain in gains
    )
    return Section(f"Gain in throughput over {question.policies[0]}", columns, rows)


def notes(question: ValidationQuestion, outcomes: Outcomes, judged: Judgement) -> list[str]:
    """Notes on the number of runs, the step times, and what error and noise mean."""
    schedule = outcomes.schedule
    loads = " and ".join(
        f"{count} requests at {load} open" for load, count in zip(question.loads, schedule.requests, strict=True)
    )
    lines = [
        f"{len(outcomes.observations)} of {outcomes.planned} runs measured, {outcomes.invalid} of them INVALID and "
        f"left out; {schedule.rounds} rounds; {loads}; prompts of {question.spec.plan.input_len} and outputs of "
        f"{question.spec.plan.output_len} tokens on average",
        _step_times(outcomes.steps),
        "error: predicted over measured, mean over the rounds; noise: half its 95 % interval, from the differences "
        "between rounds of the same run; lowest, highest: of the measured runs",
    ]
    lines += [_bias(of_metric) for of_metric in judged.metrics]
    if question.real:
        server = question.predicted_server
        predicted = f"times an API server of class {server}" if server else "times neither (--api-server off)"
        lines.append(
            "asynchronous scheduling and prefix caching are off in prediction and measurement: steps are measured one "
            f"at a time. Measured times include the API server and the client, predicted {predicted}"
        )
    else:
        lines.append(
            "a rehearsal without vLLM: in place of the measurement, policies compute from the device's own costs"
        )
    if outcomes.stopped:
        lines.append(f"incomplete: {outcomes.stopped}; the same command measures the rest")
    return lines


def _step_times(rounds: Sequence[StepTimes]) -> str:
    """How the step times were measured, and how the machine's speed changed between the rounds."""
    first = rounds[0]
    line = (
        f"{first.steps} steps measured before each round's runs, which they predict; fits R2 {first.prefill_r2:.3f} "
        f"prefill, {first.decode_r2:.3f} decode"
    )
    slowness = [ratio.slowness(first) for ratio in rounds[1:]]
    if not slowness:
        return line
    words = ["other batches fit" if ratio is None else f"{ratio:.2f}" for ratio in slowness]
    return f"{line}; steps of later rounds took {', '.join(words)} times as long as the first round's"


def _bias(metric: MetricVerdict) -> str:
    kept = {True: "within the limit", False: "beyond the limit", None: "undecided because of noise"}
    noise = f"{100 * metric.noise:.1f} %" if math.isfinite(metric.noise) else "unknown"
    return (
        f"{METRICS[metric.metric]}: median error {100 * metric.median_error:.1f} % ({kept[metric.within_limit]}), "
        f"worst {100 * metric.worst_error:.1f} %, signed median {100 * metric.bias:+.1f} %; "
        f"standard deviation between rounds {noise}"
    )


RESULT, TABLES = "result.json", "result.md"


def run_validation(question: ValidationQuestion, folder: Path, max_time_s: float, *, as_json: bool, quiet: bool) -> str:
    """Run the validation and show its result. Returns the verdict: figures, choices, neither or undecided.

    Raises UsageError, RunError, InterruptedRunError.
    """
    messages = Console(stderr=True, highlight=False)
    _open_folder(question, folder)
    with sole_use(folder):
        call = Call(sys.argv[1:], wall_clock_ns())

        def say(text: str) -> None:
            call.sample()
            messages.say(text, quiet=quiet)

        for line in announce(question, folder, max_time_s):
            say(line)
        try:
            with shown(messages, Work("validate"), quiet=quiet) as work:
                outcomes = validate(question, folder, TimeBudget(max_time_s), say, work.reached)
        except KeyboardInterrupt:
            raise InterruptedRunError(
                f"interrupted; measurements are kept in {folder}; the same command continues"
            ) from None
        finally:
            call.end()
            load_average = write_manifest(folder, question, call)
        judged = judge(outcomes.observations, question.policies[0])
        machine = describe_machine(question)
        document = as_document(question, outcomes, judged, machine, load_average)
        content = as_dict(question, outcomes, judged, machine)
        files.write_bytes(json.dumps(content, indent=1, allow_nan=False).encode() + b"\n", folder / RESULT)
        files.write_bytes(f"{as_markdown(document)}\n**{judged.sentence}.**\n".encode(), folder / TABLES)
        if as_json:
            sys.stdout.write(json.dumps(content, indent=2, allow_nan=False) + "\n")
        else:
            _show(Console(highlight=False), document, judged, folder)
        return judged.word


def announce(question: ValidationQuestion, folder: Path, max_time_s: float) -> list[str]:
    """The lines printed first: the steps to come and the time limit."""
    what = machine_name() if question.real else f"{question.spec.device}, engine {question.spec.engine}"
    loads = ", ".join(map(str, question.loads))
    lines = [
        f"validating simulated results for {question.model} on {what}, at most {max_time_s / 60:.0f} min:",
        f"  1. measure the times of up to {replace(question.grid, repeats=question.repeats).points} steps"
        + (" in vLLM, after its start" if question.real else ""),
        f"  2. predict {', '.join(question.policies)} at {loads} requests open",
        f"  3. measure the same runs; up to {question.rounds} rounds of 1. to 3.",
        f"results are kept in {folder}; after a stop the same command continues",
    ]
    if "dummy" in question.spec.vllm_options:
        lines.append("random weights (--load-format dummy): the model's folder holds no weights")
    if "--skip-tokenizer-init" in question.spec.vllm_options:
        lines.append("no tokenizer in the model's folder: prompts are token ids, and output stays token ids")
    return lines


def _open_folder(question: ValidationQuestion, folder: Path) -> None:
    """Create the folder, or continue in one with the same question, which may have more rounds now.

    Raises UsageError for any other folder, DataError for a damaged one.
    """
    path, written = folder / VALIDATION, json.dumps(question.stored, indent=1, sort_keys=True)
    if path.exists():
        stored = files.read_stored_json(path)
        try:
            rounds = int(stored["rounds"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: damaged ({error}); give another --output") from None
        if json.loads(written) | {"rounds": rounds} != stored:
            raise UsageError(f"{folder} holds a validation with other options; give another --output")
        if question.rounds < rounds:
            raise UsageError(f"{folder} holds a validation of {rounds} rounds; --rounds {question.rounds} is fewer")
    elif folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} exists and is not a validation; give another --output")
    folder.mkdir(parents=True, exist_ok=True)
    files.write_text(written + "\n", path)


def _show(console: Console, document: Document, judged: Judgement, folder: Path) -> None:
    console.print(as_rich(document, console.width))
    console.print()
    console.print(Text(f"{judged.sentence}.", style="bold"))
    console.say(f"stored in {folder}: {RESULT}, {TABLES}, manifest.json")
