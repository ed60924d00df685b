"""The command line in general: its surroundings, help, repeated options, errors and exit codes. No command is known
here.

Errors of ebbench become one line on stderr and an exit code.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import os
import re
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from ebbench.errors import EbbenchError
from ebbench.process.termination import held, received

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


# While a command runs, and how it ends.

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


@contextmanager
def told_when_long(words: Sequence[str], tell: Callable[[str, float, threading.Event], None]) -> Iterator[None]:
    """Call ``tell(command, begun_s, ended)`` in a thread of its own where a command takes longer than 10 s.

    Not for those that serve until they are stopped, nor with --quiet.
    """
    if not words or not _ENDLESS.isdisjoint(words):
        yield
        return
    began_s, ended = time.monotonic(), threading.Event()

    def wait() -> None:
        if not ended.wait(_LONG_S):
            tell(words[0], began_s, ended)

    threading.Thread(target=wait, name="elapsed", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def open_standard_streams() -> None:
    """Open what the caller closed (``>&-``) to nowhere: a file opened later would otherwise be written to as stdout."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for number, name in ((1, "stdout"), (_STDERR, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8"))


def exit_code(call: Callable[[], Any]) -> int:
    """Run ``call`` and convert an exception to an exit code; writes the message to stderr."""
    signals_before = received()
    try:
        result = call()
        sys.stdout.flush()  # what cannot be written is an error here, not one of Python's on its way out
    except EbbenchError as error:
        return complain(_with_notes(str(error), error), error.exit_code)
    except BrokenPipeError:
        _drop_output()
        return HUNG_UP
    except (KeyboardInterrupt, typer.Abort):
        return complain("interrupted", INTERRUPTED)
    except UnicodeEncodeError as error:
        return complain(_encoding_message(error), EbbenchError.exit_code)
    except OSError as error:
        _drop_output()
        return complain(_with_notes(_system_message(error), error), EbbenchError.exit_code)
    except MemoryError as error:
        return complain(_with_notes(_memory_message(error), error), EbbenchError.exit_code)
    except SystemExit as stop:
        # Typer and rich exit with 1 on a closed pipe, which is the gate's code for a regression.
        raise SystemExit(HUNG_UP if stop.code == 1 else stop.code) from None
    except Exception as error:
        return _exit_code_of(error, interrupted=received() > signals_before)
    if result == INTERRUPTED:  # typer converts Ctrl-C to this code without a message
        return complain("interrupted", INTERRUPTED)
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
        return complain(str(error), 2)
    if any(sign in str(error) for sign in _NO_MEMORY):
        return complain(_memory_message(MemoryError(str(error).splitlines()[0])), EbbenchError.exit_code)
    if not isinstance(error, CLICK_ERROR):
        what = f"interrupted ({type(error).__name__}: {error})"
        return complain(what, INTERRUPTED) if interrupted else _crashed()
    if isinstance(error, sys.modules[CLICK_ERROR.__module__].NoArgsIsHelpError):
        error.show()
        return 2
    return complain(_usage_message(error), int(error.exit_code))


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
    said = f" ({error})" if str(error) else ""
    return f"not enough memory{said}; ask for fewer requests (--num-prompts) or fewer --workers"


def _usage_message(error: Any) -> str:
    context = getattr(error, "ctx", None)
    message = " ".join(error.format_message().split())
    if context is None:
        return message
    stop = "" if message.endswith((".", "?", "!")) else "."
    return f"{message}{stop} See `{context.command_path} --help`."


_LONGEST = 2000
"""Characters up to which a message is shown as a whole: it may quote a value of megabytes."""


def complain(message: str, code: int) -> int:
    """Write an error to stderr; returns ``code``."""
    from ebbench.foreign.documents import visible  # loads readers of files, which most commands' start need not

    typer.secho("error: ", fg="red", bold=True, err=True, nl=False)
    shown = message if len(message) <= _LONGEST else f"{message[: _LONGEST // 2]} ... {message[-500:]}"
    typer.echo(wrapped(visible(shown, lines=True)), err=True)
    return code


def wrapped(message: str) -> str:
    """The message after "error: ", broken between words on a terminal; elsewhere one line, which tools can search."""
    if not sys.stderr.isatty():
        return message
    width = shutil.get_terminal_size().columns
    lines = (
        textwrap.fill(f"{'' if number else 'error: '}{line}", width, break_long_words=False, break_on_hyphens=False)
        for number, line in enumerate(message.split("\n"))
    )
    return "\n".join(lines).removeprefix("error: ")


# Help, and what the parser refuses.

HELP_ALL = "--help-all"


# Newer versions of typer build a pydantic model for each parameter of a command, given or not: 0.1 s for `ebbench run`.

_WHOLE = re.compile(r"-?\d{1,18}", re.ASCII)
_NUMBER = re.compile(r"-?\d{1,18}(\.\d{1,18})?", re.ASCII)
_NOT_TEXT = (bool, int, float)
"""Types of values that did not come from the command line, which holds texts."""


def read_plainly(parameters: Iterable[Any]) -> None:
    """Make a command's parameters read absent values, texts, numbers and paths without typer's models.

    All else is read by typer, and so is what it would refuse.
    """
    for parameter in parameters:
        if getattr(parameter, "type_descriptor", None) is not None:  # else a version of typer without these models
            parameter.process_value = partial(_processed, parameter, type(parameter).process_value)


def _processed(parameter: Any, process: Callable[..., Any], context: Any, value: Any) -> Any:
    """The value of a parameter; ``process`` is typer's own reading of it."""
    several = parameter.multiple or parameter.nargs == -1
    if value is None and not parameter.required:
        read: Any = () if several else None
    elif value is None or (read := _read_all(parameter, value, several)) is None:
        return process(parameter, context, value)
    return read if parameter.callback is None else parameter.callback(context, parameter, read)


def _read_all(parameter: Any, value: Any, several: bool) -> Any:
    about, kind = parameter.type_descriptor.parameter_info, parameter.type_descriptor.annotation
    if not several:
        return _read(value, kind, about)
    if get_origin(kind) is not list or not isinstance(value, list | tuple) or not value:
        return None
    read = [_read(given, get_args(kind)[0], about) for given in value]
    return None if None in read else read


def _read(value: Any, kind: Any, about: Any) -> Any:
    """The value that typer would read, where that is plain; else None."""
    if about.parser is not None:
        return None
    if type(value) in _NOT_TEXT:
        return value if type(value) is kind else None
    if not isinstance(value, str):
        return None
    if kind is str:
        return value
    if kind is Path:
        path = Path(value)
        return path if _unchecked(about) and (not path.exists() or os.access(path, os.R_OK)) else None
    form = {int: _WHOLE, float: _NUMBER}.get(kind)
    if form is None or not form.fullmatch(value) or not (about.min is None and about.max is None):
        return None
    return kind(value)


def _unchecked(about: Any) -> bool:
    """Whether an option for a path asks for nothing but a path."""
    checks = about.exists or about.writable or about.resolve_path or about.allow_dash or about.path_type is not None
    return bool(about.file_okay and about.dir_okay and not checks)


class ShownWhole:
    """Mixed into a command: plain values are read quickly, and help never cuts an option's name.

    Typer shows positive and negative names in separate columns, which rich cuts; here they share one column, one name
    per line, whose width rich takes from the help text's.
    """

    params: list[Any]
    add_help_option: bool
    get_params: Callable[[Any], list[Any]]
    epilog: str | None
    everyday: frozenset[str] = frozenset()
    """Names of the options that ``--help`` shows; the others are shown by ``--help-all``. Empty: all."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; see :func:`read_plainly`."""
        read_plainly(self.get_params(ctx))  # with that for help
        parsed: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]
        return parsed

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write help from a copy with readable option names; parsing is not affected."""
        shown = copy.copy(self)
        params = self.get_params(ctx)
        everyday = {*self.everyday, "help"}
        whole = not self.everyday or ctx.meta.get(HELP_ALL)
        chosen = [one for one in params if whole or not isinstance(one, TyperOption) or one.name in everyday]
        if len(chosen) < len(params):
            shown.epilog = f"{len(params) - len(chosen)} more options: `{ctx.command_path} {HELP_ALL}`."
        shown.params = [_readable(param) for param in chosen]
        shown.add_help_option = False  # already among them
        with _names_uncut():
            super(ShownWhole, shown).format_help(ctx, formatter)  # type: ignore[misc]


class Group(ShownWhole, TyperGroup):
    """A command of ebbench with commands below it and options of its own."""


class Command(ShownWhole, TyperCommand):
    """A command of ebbench."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Print all options for ``--help-all``, where ``--help`` shows some; else parse the arguments."""
        words = args[: args.index("--")] if "--" in args else args
        if self.everyday and HELP_ALL in words:
            ctx.meta[HELP_ALL] = True
            typer.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()
        return super().parse_args(ctx, args)


def click_command(made: Any, name: str) -> Any:
    """A function, which may set its click class in ``command_class``, or an application of typer as a click command."""
    if not isinstance(made, typer.Typer):
        function, made = (
            made,
            typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False),
        )
        kind: type[TyperCommand] = getattr(function, "command_class", Command)
        made.command(name, cls=kind, context_settings={"help_option_names": ["-h", "--help"]})(function)
    command: Any = typer.main.get_command(made)
    command.name = name
    _flow(command)
    _refuse_repeats(command)
    return command


_WITHIN_PARAGRAPH = re.compile(r"(?<!\n)\n(?!\n)")


class CommandEntry(NamedTuple):
    """How a command is listed: its line of help, and the panel that it stands in."""

    help: str
    panel: str


class CommandTable(Group):
    """A group that imports a command only when it is called: ``entries`` by name, modules of that name in ``package``.

    A command is the function of its module's name, or ``app``.
    """

    entries: ClassVar[Mapping[str, CommandEntry]]
    package: ClassVar[str]

    def list_commands(self, ctx: Any) -> list[str]:
        """Commands whose module exists, in the order of the table."""
        return [name for name in self.entries if self._installed(name)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command if loaded, else a placeholder with its help line."""
        if cmd_name not in self.commands and cmd_name in self.entries and self._installed(cmd_name):
            entry = self.entries[cmd_name]
            return TyperCommand(cmd_name, short_help=entry.help, help=entry.help, rich_help_panel=entry.panel)
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the called command."""
        name = args[0]
        if name not in self.commands and name in self.list_commands(ctx):
            self.add_command(self.load_command(name), name)
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

    def load_command(self, name: str) -> Any:
        """Import a command of the table and convert it to a click command."""
        with held():  # an import that is broken off may raise anything
            loaded = importlib.import_module(self._module(name))
        command = click_command(getattr(loaded, "app", None) or getattr(loaded, name.replace("-", "_")), name)
        command.short_help, command.rich_help_panel = self.entries[name]
        return command

    def _module(self, name: str) -> str:
        return f"{self.package}.{name.replace('-', '_')}"

    def _installed(self, name: str) -> bool:
        return importlib.util.find_spec(self._module(name)) is not None


def _flow(command: Any) -> None:
    """Let paragraphs of help fill the terminal's width, also for subcommands."""
    if command.help:
        command.help = _WITHIN_PARAGRAPH.sub(" ", command.help)
    for sub in getattr(command, "commands", {}).values():
        _flow(sub)


@contextmanager
def _names_uncut() -> Iterator[None]:
    """While it lasts, typer's tables of options never narrow the column of names; typer has no setting for it."""
    from rich.table import Table
    from typer import rich_utils

    class NamesUncut(Table):
        def add_row(self, *cells: Any, **how: Any) -> None:
            super().add_row(*cells, **how)
            for column, cell in zip(self.columns, cells, strict=False):
                column.no_wrap = column.no_wrap or str(cell).startswith("--")

    module: Any = rich_utils
    module.Table = NamesUncut
    try:
        yield
    finally:
        module.Table = Table


def _readable(option: Any) -> Any:
    if not isinstance(option, TyperOption):
        return option
    shown = copy.copy(option)
    names = [*option.opts, *option.secondary_opts]
    shown.opts = [",\n".join(name for name in names if name.startswith("--"))]
    shown.opts += [name for name in names if not name.startswith("--")]
    if option.secondary_opts:
        shown.secondary_opts = []
        if option.default is not None:  # otherwise typer would say True or False
            shown.show_default = "on" if option.default else "off"
    if shown.is_flag:
        shown.metavar = ""  # has no value
    elif shown.multiple and shown.metavar is None:
        shown.metavar = "<str>..."
    return shown


def _refuse_repeats(command: Any) -> None:
    """Make a command, and those below it, refuse an option of one value that is given twice.

    Click takes the last value without a word. Options that collect values, and flags given twice alike, stay allowed.
    """
    make_parser = command.make_parser

    def strict_parser(context: Any) -> Any:
        parser = make_parser(context)
        parse = parser.parse_args

        def parse_args(args: list[str]) -> Any:
            words = list(args)  # the parser consumes its argument
            options, rest, order = parse(args=args)
            if not context.resilient_parsing:
                for option in dict.fromkeys(order):
                    _refuse_repeated(context, option, order.count(option), words)
            return options, rest, order

        parser.parse_args = parse_args
        return parser

    command.make_parser = strict_parser
    for below in getattr(command, "commands", {}).values():
        _refuse_repeats(below)


def _refuse_repeated(context: Any, option: Any, times: int, words: Sequence[str]) -> None:
    """Raise click's usage error if ``option``, given ``times`` times among ``words``, takes one value."""
    if times == 1 or not isinstance(option, TyperOption) or option.multiple or option.count:
        return
    names = (*option.opts, *option.secondary_opts)
    given = [word for word in words[: words.index("--") if "--" in words else None] if word.split("=")[0] in names]
    if not option.is_flag:
        context.fail(f"{option.opts[0]} takes one value and is given {times} times; give it once.")
    elif len({word in option.opts for word in given}) > 1:
        context.fail(f"{' and '.join(dict.fromkeys(given))} contradict each other; give one of them.")


class GoodputCommand(Command):
    """Accepts ``--goodput ttft:500 tpot:50`` and repeated ``--goodput``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Rewrite the arguments, then parse them."""
        return super().parse_args(ctx, expand_goodput(args))


# A workload may follow the pairs: log:FILE and trace:FILE are not among them.
_PAIR = re.compile(r"^(?!trace:|log:)[a-z0-9_]+:[^/]*$", re.IGNORECASE)


def expand_goodput(args: Sequence[str]) -> list[str]:
    """Insert ``--goodput`` before every further ``metric:limit`` that follows one."""
    expanded: list[str] = []
    rest = list(args)
    while rest:
        expanded.append(rest.pop(0))
        if expanded[-1] == "--goodput" and rest:
            expanded.append(rest.pop(0))
            while rest and _PAIR.match(rest[0]):
                expanded += ["--goodput", rest.pop(0)]
    return expanded
