"""The console entry point. A command's module is imported only when that command runs or shows its help.

To add a command, add a line to COMMANDS. Errors of ebbench become one line on stderr and an exit code.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand

from ebbench.cli.options import Command, Group, refuse_repeats
from ebbench.errors import EbbenchError, UsageError
from ebbench.process.interpreter import one_numeric_thread
from ebbench.process.termination import finish, held, received
from ebbench.untrusted import visible

# What is wrong with a command's surroundings, found before anything is measured.

_PRINTED = "µ–×│━→"
"""Characters that tables and sentences hold beside ASCII."""
_PLAIN = frozenset({"--json", "--help", "-h", "--version"})
"""Options of commands that print ASCII alone, or adapt to the encoding."""
_UTF8 = "set LC_ALL=C.UTF-8"


def refusal(arguments: Sequence[str]) -> str | None:
    """Why a command with these arguments cannot give its result here, with the remedy; None if it can."""
    for text in (*arguments, _working_directory()):
        if problem := _problem_of(text):
            return problem
    return None if _PLAIN & set(arguments) else _output_problem()


def _working_directory() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # removed: commands that need it say so
        return ""


def _problem_of(text: str) -> str | None:
    """Why a text from the system cannot be stored: stored files hold Unicode."""
    encoding = sys.getfilesystemencoding()
    if encoding.lower() not in ("utf-8", "utf8") and not text.isascii():
        return f"{text!a}: the locale's encoding is {encoding}, not UTF-8; {_UTF8}"
    if any("\ud800" <= letter <= "\udfff" for letter in text):  # Python's form of bytes that are not UTF-8
        return f"{text!a}: not UTF-8; rename the file or directory"
    return None


def _output_problem() -> str | None:
    try:
        _PRINTED.encode(sys.stdout.encoding or "utf-8", sys.stdout.errors or "strict")
    except (UnicodeEncodeError, LookupError):
        lacking = f"the output's encoding, {sys.stdout.encoding}, lacks characters that ebbench prints"
        return f"{lacking}; set PYTHONIOENCODING=utf-8 or LC_ALL=C.UTF-8"
    return None


class CommandEntry(NamedTuple):
    """Location of a command: ``target`` is ``module:attribute`` of a function or a Typer application."""

    target: str
    panel: str
    help: str


MEASURE, UNDERSTAND, LOOK_UP, SERVE = "Measure", "Understand", "Look up", "Serve and check"

COMMANDS: dict[str, CommandEntry] = {
    "run": CommandEntry("ebbench.cli.run:run", MEASURE, "Run a workload under one or more scheduling policies."),
    "init": CommandEntry("ebbench.cli.init:init", MEASURE, "Write a commented file of settings, to edit and run."),
    "show": CommandEntry("ebbench.cli.show:show", MEASURE, "Show stored runs again."),
    "runs": CommandEntry("ebbench.cli.runs:app", MEASURE, "List stored runs; remove, move or export them."),
    "capacity": CommandEntry("ebbench.cli.capacity:capacity", MEASURE, "Find the highest load within latency limits."),
    "plan": CommandEntry("ebbench.cli.plan:plan", UNDERSTAND, "Find the cheapest GPUs for a request rate."),
    "sweep": CommandEntry("ebbench.cli.sweep:sweep", MEASURE, "Run a grid of settings; can be resumed."),
    "compare": CommandEntry("ebbench.cli.compare:compare", MEASURE, "Compare runs, paired."),
    "trend": CommandEntry("ebbench.cli.trend:trend", MEASURE, "Follow figures over commits; find changes."),
    "gate": CommandEntry("ebbench.cli.gate:gate", MEASURE, "Fail when a candidate is slower than its baseline."),
    "report": CommandEntry("ebbench.cli.report:report", MEASURE, "Write runs as one self-contained HTML file."),
    "query": CommandEntry("ebbench.cli.query:query", MEASURE, "Query stored runs in SQL."),
    "recover": CommandEntry("ebbench.cli.recover:recover", MEASURE, "Rebuild a run whose program was killed."),
    "advise": CommandEntry("ebbench.cli.advise:advise", UNDERSTAND, "Find the best policy and its expected gain."),
    "theory": CommandEntry(
        "ebbench.cli.theory:app", UNDERSTAND, "Evaluate thresholds, memory-safe batches, crossover."
    ),
    "hazard": CommandEntry("ebbench.cli.hazard:hazard", UNDERSTAND, "Analyse the completion hazard of a workload."),
    "tables": CommandEntry("ebbench.cli.tables:tables", UNDERSTAND, "Show the papers' tables with our results."),
    "figures": CommandEntry("ebbench.cli.figures:figures", UNDERSTAND, "Draw the papers' figures and run timelines."),
    "fidelity": CommandEntry(
        "ebbench.cli.fidelity:fidelity", UNDERSTAND, "Compare emulated devices with published measurements."
    ),
    "calibrate": CommandEntry("ebbench.cli.calibrate:calibrate", UNDERSTAND, "Measure a device's step times."),
    "validate": CommandEntry(
        "ebbench.cli.validate:validate", UNDERSTAND, "Check how accurate simulated results are on this machine."
    ),
    "workloads": CommandEntry("ebbench.cli.workloads:app", LOOK_UP, "List workloads: which requests are sent."),
    "scenarios": CommandEntry("ebbench.cli.scenarios:app", LOOK_UP, "List scenarios: when requests arrive."),
    "policies": CommandEntry("ebbench.cli.policies:app", LOOK_UP, "List scheduling policies and their settings."),
    "devices": CommandEntry("ebbench.cli.devices:app", LOOK_UP, "List devices, models and step times."),
    "serve": CommandEntry("ebbench.cli.serve:serve", SERVE, "Serve a model with vLLM under a policy."),
    "gateway": CommandEntry("ebbench.cli.gateway:gateway", SERVE, "Dispatch requests over several servers."),
    "doctor": CommandEntry("ebbench.cli.doctor:doctor", SERVE, "Check what is installed and can run here."),
    "fake-server": CommandEntry("ebbench.cli.fake_server:fake_server", SERVE, "Run a server with known latencies."),
    "client-check": CommandEntry(
        "ebbench.cli.client_check:client_check", SERVE, "Measure how much load this client can generate."
    ),
}

_LONG_S = 10.0
_ENDLESS = frozenset({"serve", "gateway", "fake-server", "--quiet", "-q", "--watch"})

INTERRUPTED = 130
_STDERR = 2
CLICK_ERROR: Any = typer.BadParameter.__mro__[2]
"""Base class of click's errors, taken from typer, which may bundle click under another name."""
HUNG_UP = 141
"""The reader of the output closed it (``| head``): the exit code that a shell reports for SIGPIPE."""
_NO_MEMORY = (
    "failed to map segment", "Cannot allocate memory", "can't start new thread", "Failed to launch worker thread",
    "pthread_create failed", "bad allocation", "std::bad_alloc",
)  # fmt: skip
"""How the dynamic linker, Python, Arrow and libraries in C++ say that there is too little memory."""
_WITHIN_PARAGRAPH = re.compile(r"(?<!\n)\n(?!\n)")


class CommandTable(Group):
    """A group that imports a command only when it is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Commands whose module exists, in the order of the table."""
        return [name for name in COMMANDS if _installed(COMMANDS[name])]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command if loaded, else a placeholder with its help line."""
        if cmd_name not in self.commands and cmd_name in COMMANDS and _installed(COMMANDS[cmd_name]):
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
        return sys.exit(_exit_code(call)) if standalone_mode else call()


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
    _open_standard_streams()
    try:
        if refused := refusal(sys.argv[1:]):
            sys.exit(_complain(refused, UsageError.exit_code))
        with _told_when_long(sys.argv[1:]):
            app(prog_name="ebbench")
    except KeyboardInterrupt:  # before a command was found
        sys.exit(_complain("interrupted", INTERRUPTED))
    finally:
        finish()


@contextmanager
def _told_when_long(words: Sequence[str]) -> Iterator[None]:
    """Say on stderr how long a command has worked, every 10 s in which it shows no progress itself.

    Not for those that serve until they are stopped, nor with --quiet.
    """
    entry = COMMANDS.get(words[0]) if words else None
    if entry is None or not _ENDLESS.isdisjoint(words):
        yield
        return
    began_s, ended = time.monotonic(), threading.Event()

    def tell() -> None:
        if not ended.wait(_LONG_S):
            from ebbench.render.live import tell_elapsed

            tell_elapsed(words[0], began_s, ended)

    threading.Thread(target=tell, name="elapsed", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _open_standard_streams() -> None:
    """Open what the caller closed (``>&-``) to nowhere: a file opened later would otherwise be written to as stdout."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for number, name in ((1, "stdout"), (_STDERR, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8"))


def load_command(name: str) -> Any:
    """Import a command of the table and convert it to a click command."""
    entry = COMMANDS[name]
    module, _, attribute = entry.target.partition(":")
    with held(), one_numeric_thread():  # an import that is broken off may raise anything
        loaded = getattr(importlib.import_module(module), attribute)
    command: Any = typer.main.get_command(loaded if isinstance(loaded, typer.Typer) else _single(loaded, name))
    _flow(command)
    refuse_repeats(command)
    command.name, command.short_help = name, entry.help
    command.rich_help_panel = entry.panel
    return command


def _flow(command: Any) -> None:
    """Let paragraphs of help fill the terminal's width, also for subcommands."""
    if command.help:
        command.help = _WITHIN_PARAGRAPH.sub(" ", command.help)
    for sub in getattr(command, "commands", {}).values():
        _flow(sub)


def _single(function: Callable[..., None], name: str) -> typer.Typer:
    """An application with a single command. A function may set its click class in ``command_class``."""
    single = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
    command_class: type[TyperCommand] = getattr(function, "command_class", Command)
    single.command(name, cls=command_class, context_settings={"help_option_names": ["-h", "--help"]})(function)
    return single


def _installed(entry: CommandEntry) -> bool:
    return importlib.util.find_spec(entry.target.partition(":")[0]) is not None


def _exit_code(call: Callable[[], Any]) -> int:
    """Run ``call`` and convert an exception to an exit code; writes the message to stderr."""
    signals_before = received()
    try:
        result = call()
        sys.stdout.flush()  # what cannot be written is an error here, not one of Python's on its way out
    except EbbenchError as error:
        return _complain(_with_notes(str(error), error), error.exit_code)
    except BrokenPipeError:
        _drop_output()
        return HUNG_UP
    except (KeyboardInterrupt, typer.Abort):
        return _complain("interrupted", INTERRUPTED)
    except UnicodeEncodeError as error:
        return _complain(_encoding_message(error), EbbenchError.exit_code)
    except OSError as error:
        _drop_output()
        return _complain(_with_notes(_system_message(error), error), EbbenchError.exit_code)
    except MemoryError as error:
        return _complain(_with_notes(_memory_message(error), error), EbbenchError.exit_code)
    except SystemExit as stop:
        # Typer and rich exit with 1 on a closed pipe, which is the gate's code for a regression.
        raise SystemExit(HUNG_UP if stop.code == 1 else stop.code) from None
    except Exception as error:
        return _exit_code_of(error, interrupted=received() > signals_before)
    if result == INTERRUPTED:  # typer converts Ctrl-C to this code without a message
        return _complain("interrupted", INTERRUPTED)
    return result if isinstance(result, int) else 0


def _drop_output() -> None:
    """Redirect output that cannot be written to /dev/null: Python would try again at exit."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _exit_code_of(error: Exception, *, interrupted: bool) -> int:
    """The exit code of an error from outside ebbench; writes the message to stderr.

    ``interrupted``: after a signal, which libraries turn into errors of their own where it ends their import.
    """
    from vllm_eb.settings import GivenValueError

    if isinstance(error, GivenValueError):
        return _complain(str(error), 2)
    if any(sign in str(error) for sign in _NO_MEMORY):
        return _complain(_memory_message(MemoryError(str(error).splitlines()[0])), EbbenchError.exit_code)
    if not isinstance(error, CLICK_ERROR):
        what = f"interrupted ({type(error).__name__}: {error})"
        return _complain(what, INTERRUPTED) if interrupted else _crashed()
    if isinstance(error, sys.modules[CLICK_ERROR.__module__].NoArgsIsHelpError):
        error.show()
        return 2
    return _complain(_usage_message(error), int(error.exit_code))


def _with_notes(message: str, error: BaseException) -> str:
    """The message and what was noted on the error on its way, such as where a run is kept."""
    return ". ".join((message, *getattr(error, "__notes__", ())))


def _crashed() -> int:
    """Show the traceback of a bug in ebbench. Python would exit with 1, which is the gate's code for a regression."""
    import traceback

    traceback.print_exc()
    return EbbenchError.exit_code


def _encoding_message(error: UnicodeEncodeError) -> str:
    text = error.object[error.start : error.end]
    if any(
        "\ud800" <= letter <= "\udfff" for letter in text
    ):  # Python's representation of bytes in a path that are not UTF-8
        return f"{error.object!a}: not UTF-8; rename the file or directory"
    return f"the output's encoding, {error.encoding}, has no {text!a}; set PYTHONIOENCODING=utf-8"


def _system_message(error: OSError) -> str:
    """The operating system's reason, with the file if there is one."""
    why = error.strerror or str(error) or type(error).__name__
    return f"{error.filename}: {why}" if error.filename else why


def _memory_message(error: MemoryError) -> str:
    """What numpy or Arrow could not allocate, if they say so, and the remedy."""
    detail = f" ({error})" if str(error) else ""
    return f"not enough memory{detail}; ask for fewer requests (--num-prompts) or fewer --workers"


def _usage_message(error: Any) -> str:
    context = getattr(error, "ctx", None)
    message = " ".join(error.format_message().split())
    if context is None:
        return message
    stop = "" if message.endswith((".", "?", "!")) else "."
    return f"{message}{stop} See `{context.command_path} --help`."


_LONGEST = 2000
"""Characters up to which a message is shown as a whole: it may quote a value of megabytes."""


def _complain(message: str, code: int) -> int:
    typer.secho("error: ", fg="red", bold=True, err=True, nl=False)
    shown = message if len(message) <= _LONGEST else f"{message[: _LONGEST // 2]} ... {message[-500:]}"
    typer.echo(_wrapped(visible(shown, lines=True)), err=True)
    return code


def _wrapped(message: str) -> str:
    """The message after "error: ", broken between words on a terminal; elsewhere one line, which tools can search."""
    if not sys.stderr.isatty():
        return message
    width = shutil.get_terminal_size().columns
    lines = (
        textwrap.fill(f"{'' if number else 'error: '}{line}", width, break_long_words=False, break_on_hyphens=False)
        for number, line in enumerate(message.split("\n"))
    )
    return "\n".join(lines).removeprefix("error: ")
