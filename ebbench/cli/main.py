"""The console entry point. A command's module is imported only when that command runs or shows its help.

To add a command, add a line to COMMANDS and a module of its name.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand

from ebbench.errors import UsageError
from ebbench.process.command_line import (
    INTERRUPTED,
    Group,
    click_command,
    complain,
    exit_code,
    open_standard_streams,
    refusal,
    told_when_long,
)
from ebbench.process.termination import finish, held


class CommandEntry(NamedTuple):
    """Where a command is listed, and as what. It is the function ``run`` of ``ebbench.cli.run``, or its ``app``."""

    help: str
    panel: str


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


class CommandTable(Group):
    """A group that imports a command only when it is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Commands whose module exists, in the order of the table."""
        return [name for name in COMMANDS if _installed(name)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command if loaded, else a placeholder with its help line."""
        if cmd_name not in self.commands and cmd_name in COMMANDS and _installed(cmd_name):
            entry = COMMANDS[cmd_name]
            return TyperCommand(cmd_name, short_help=entry.help, help=entry.help, rich_help_panel=entry.panel)
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the called command."""
        name = args[0]
        if name not in self.commands and name in self.list_commands(ctx):
            self.add_command(load_command(name), name)
        elif name not in self.commands:
            for known in self.list_commands(ctx):  # typer suggests among the commands it holds
                self.add_command(self.get_command(ctx, known), known)
        return super().resolve_command(ctx, args)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run; in stand-alone mode errors end the process with one line and their exit code."""
        call = partial(super().main, args, prog_name, complete_var, False, windows_expand_args, **extra)
        return sys.exit(exit_code(call)) if standalone_mode else call()


app = typer.Typer(
    cls=CommandTable,
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
    module, entry = _module(name), COMMANDS[name]
    with held():  # an import that is broken off may raise anything
        loaded = importlib.import_module(module)
    command = click_command(getattr(loaded, "app", None) or getattr(loaded, module.rpartition(".")[2]), name)
    command.short_help, command.rich_help_panel = entry
    return command


def _module(name: str) -> str:
    return f"ebbench.cli.{name.replace('-', '_')}"


def _installed(name: str) -> bool:
    return importlib.util.find_spec(_module(name)) is not None
