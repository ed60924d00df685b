"""The steps of ``ebbench validate``: announce, predict and measure, judge, store the result, show it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbench.engines.machine import machine_name
from ebbench.errors import DataError, InterruptedRunError, UsageError
from ebbench.records import files
from ebbench.records.files import sole_use
from ebbench.records.manifest import wall_clock_ns
from ebbench.validation.document import as_dict, as_document
from ebbench.validation.drive import validate
from ebbench.validation.judge import Judgement, judge
from ebbench.validation.machine import Call, describe_machine, write_manifest
from ebbench.validation.question import TimeBudget, ValidationQuestion

if TYPE_CHECKING:
    from ebbench.analysis.documents import Document
    from ebbench.render.console import Console

QUESTION, RESULT, TABLES = "question.json", "result.json", "result.md"


def run_validation(question: ValidationQuestion, folder: Path, max_time_s: float, *, as_json: bool, quiet: bool) -> str:
    """Run the validation and show its result. Returns the verdict: figures, choices, neither or undecided.

    Raises UsageError, RunError, InterruptedRunError.
    """
    from ebbench.render.console import Console

    messages = Console(stderr=True, highlight=False)
    _open_folder(question, folder)
    with sole_use(folder):
        return _run_validation(question, folder, max_time_s, messages, as_json=as_json, quiet=quiet)


def _run_validation(
    question: ValidationQuestion, folder: Path, max_time_s: float, messages: Console, *, as_json: bool, quiet: bool
) -> str:
    from ebbench.render.console import Console
    from ebbench.render.documents import as_markdown
    from ebbench.render.live import Work, shown

    call = Call(sys.argv[1:], wall_clock_ns())

    def say(text: str) -> None:
        call.sample()
        if not quiet:
            messages.print(text, markup=False, soft_wrap=True)

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
    found = as_dict(question, outcomes, judged, machine)
    _store(folder, found, f"{as_markdown(document)}\n**{judged.verdict.sentence}.**\n")
    if as_json:
        sys.stdout.write(json.dumps(found, indent=2, allow_nan=False) + "\n")
    else:
        _show(Console(highlight=False), document, judged, folder)
    return judged.verdict.word


def announce(question: ValidationQuestion, folder: Path, max_time_s: float) -> list[str]:
    """The lines printed first: the steps to come and the time limit."""
    what = machine_name() if question.engine == "vllm" else f"{question.device}, engine {question.engine}"
    loads = ", ".join(map(str, question.loads))
    lines = [
        f"validating simulated results for {question.model} on {what}, at most {max_time_s / 60:.0f} min:",
        f"  1. measure the times of up to {replace(question.grid, repeats=question.repeats).points} steps"
        + (" in vLLM, after its start" if question.engine == "vllm" else ""),
        f"  2. predict {', '.join(question.policies)} at {loads} requests open",
        f"  3. measure the same runs; up to {question.rounds} rounds of 1. to 3.",
        f"results are kept in {folder}; after a stop the same command continues",
    ]
    if "dummy" in question.vllm_options:
        lines.append("random weights (--load-format dummy): the model's folder holds no weights")
    if "--skip-tokenizer-init" in question.vllm_options:
        lines.append("no tokenizer in the model's folder: prompts are token ids, and output stays token ids")
    return lines


def _open_folder(question: ValidationQuestion, folder: Path) -> None:
    """Create the folder, or continue in one with the same question, which may have more rounds now.

    Raises UsageError for any other folder, DataError for a damaged one.
    """
    path = folder / QUESTION
    if not path.exists():
        if folder.exists() and any(folder.iterdir()):
            raise UsageError(f"{folder} exists and is not a validation; give another --output")
        folder.mkdir(parents=True, exist_ok=True)
    else:
        _check_same(question, path)
    files.write_bytes(_as_json(question), path)


def _as_json(question: ValidationQuestion) -> bytes:
    return json.dumps(asdict(question), indent=1, sort_keys=True).encode() + b"\n"


def _check_same(question: ValidationQuestion, path: Path) -> None:
    stored = files.read_stored_json(path)
    try:
        rounds = int(stored["rounds"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: damaged ({error}); give another --output") from None
    if json.loads(_as_json(replace(question, rounds=rounds))) != stored:
        raise UsageError(f"{path.parent} holds a validation with other options; give another --output")
    if question.rounds < rounds:
        raise UsageError(f"{path.parent} holds a validation of {rounds} rounds; --rounds {question.rounds} is fewer")


def _store(folder: Path, found: dict[str, Any], tables: str) -> None:
    files.write_bytes(json.dumps(found, indent=1, allow_nan=False).encode() + b"\n", folder / RESULT)
    files.write_bytes(tables.encode(), folder / TABLES)


def _show(console: Console, document: Document, judged: Judgement, folder: Path) -> None:
    from rich.text import Text

    from ebbench.render.documents import as_rich

    console.print(as_rich(document, console.width))
    console.print()
    console.print(Text(f"{judged.verdict.sentence}.", style="bold"))
    console.print(f"stored in {folder}: {RESULT}, {TABLES}, manifest.json", markup=False, soft_wrap=True)
