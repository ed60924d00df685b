"""The console entry point. A command's module is imported only when that command runs or shows its help.

To add a command, add a line to COMMANDS and a module of its name.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import typer

from ebbench.errors import UsageError
from ebbench.process.command_line import (
    INTERRUPTED,
    CommandEntry,
    CommandTable,
    complain,
    open_standard_streams,
    refusal,
    told_when_long,
)
from ebbench.process.termination import finish

MEASURE, UNDERSTAND, LOOK_UP, SERVE = "Measure", "Understand", "Look up", "Serve and check"

COMMANDS: dict[str, CommandEntry] = {
    "run": CommandEntry("Run a workload under one or more scheduling policies.", MEASURE),
    "init": CommandEntry("Write a commented file of settings, to edit and run.", MEASURE),
    "show": CommandEntry("Show stored runs again.", MEASURE),
    "runs": CommandEntry("List stored runs; remove, move or export them.", MEASURE),
    "capacity": CommandEntry("Find the highest load within latency limits.", MEASURE),
    "plan": CommandEntry("Find the cheapest GPUs for a request rate.", UNDERSTAND),
    "sweep": CommandEntry("Run a grid of settings; can be resumed.", MEASURE),
    "compare": CommandEntry("Compare runs, paired.", MEASURE),
    "trend": CommandEntry("Follow figures over commits; find changes.", MEASURE),
    "gate": CommandEntry("Fail when a candidate is slower than its baseline.", MEASURE),
    "report": CommandEntry("Write runs as one self-contained HTML file.", MEASURE),
    "query": CommandEntry("Query stored runs in SQL.", MEASURE),
    "recover": CommandEntry("Rebuild a run whose program was killed.", MEASURE),
    "advise": CommandEntry("Find the best policy and its expected gain.", UNDERSTAND),
    "theory": CommandEntry("Evaluate thresholds, memory-safe batches, crossover.", UNDERSTAND),
    "hazard": CommandEntry("Analyse the completion hazard of a workload.", UNDERSTAND),
    "tables": CommandEntry("Show the papers' tables with our results.", UNDERSTAND),
    "figures": CommandEntry("Draw the papers' figures and run timelines.", UNDERSTAND),
    "fidelity": CommandEntry("Compare emulated devices with published measurements.", UNDERSTAND),
    "calibrate": CommandEntry("Measure a device's step times.", UNDERSTAND),
    "validate": CommandEntry("Check how accurate simulated results are on this machine.", UNDERSTAND),
    "workloads": CommandEntry("List workloads: which requests are sent.", LOOK_UP),
    "scenarios": CommandEntry("List scenarios: when requests arrive.", LOOK_UP),
    "policies": CommandEntry("List scheduling policies and their settings.", LOOK_UP),
    "devices": CommandEntry("List devices, models and step times.", LOOK_UP),
    "serve": CommandEntry("Serve a model with vLLM under a policy.", SERVE),
    "gateway": CommandEntry("Dispatch requests over several servers.", SERVE),
    "doctor": CommandEntry("Check what is installed and can run here.", SERVE),
    "fake-server": CommandEntry("Run a server with known latencies.", SERVE),
    "client-check": CommandEntry("Measure how much load this client can generate.", SERVE),
}


class _Commands(CommandTable):
    entries, package = COMMANDS, "ebbench.cli"


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from ebbench import __version__

        typer.echo(f"ebbench {__version__}")
        raise typer.Exit


@app.callback()
def _about(
    version: bool = typer.Option(
        False, "--version", help="Show the version and exit.", is_eager=True, callback=_show_version
    ),
) -> None:
    """Which batching discipline, on my GPU, for my traffic?

    Start with: ebbench run sharegpt --policy v1 --policy ebplus
    """


def run() -> None:
    """Run the command line of this process."""
    open_standard_streams()
    words = sys.argv[1:]
    try:
        if refused := refusal(words):
            sys.exit(complain(refused, UsageError.exit_code))
        with told_when_long(words if words and words[0] in COMMANDS else (), _tell_elapsed):
            app(prog_name="ebbench")
    except KeyboardInterrupt:  # before a command was found
        sys.exit(complain("interrupted", INTERRUPTED))
    finally:
        finish()


def _tell_elapsed(name: str, began_s: float, ended: threading.Event) -> None:
    from ebbench.render.live import tell_elapsed  # only a command that takes long needs it

    tell_elapsed(name, began_s, ended)


def load_command(name: str) -> Any:
    """Import a command of the table and convert it to a click command."""
    return _Commands().load_command(name)
