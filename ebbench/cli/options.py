"""Declaring, grouping and showing options; ``--goodput`` with several pairs."""

from __future__ import annotations

import copy
import inspect
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Protocol, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from ebbench.errors import UnknownNameError, UsageError
from ebbench.untrusted import visible

# Refuses options that would have no effect.


def refuse_unused(context: typer.Context, options: Iterable[str], reads: Collection[str], what: str) -> None:
    """Raise UsageError for the first of ``options`` (parameter names) that was given but is not read by ``what``."""
    names = {param.name: _option_as_written(param) for param in context.command.params}
    for option in given_options(context, [option for option in options if option not in reads]):
        it = f"it uses {', '.join(names[name] for name in reads)}" if reads else "leave it out"
        raise UsageError(f"{what} does not use {option}; {it}")


def given_options(context: typer.Context, options: Iterable[str]) -> list[str]:
    """The ``options`` (parameter names) that are on the command line, as the user writes them."""
    names = {param.name: _option_as_written(param) for param in context.command.params}
    sources = {option: context.get_parameter_source(option) for option in options}
    return [names[option] for option, source in sources.items() if source and source.name == "COMMANDLINE"]


def _option_as_written(param: Any) -> str:
    return str(param.opts[0] if param.param_type_name == "option" else param.name.upper())


# `--format` of the commands that show tables of runs: table, Markdown or CSV.

FORMATS = ("table", "markdown", "csv")
Format = Annotated[
    str, typer.Option("--format", "-f", help="table, markdown, or csv (only the tables, figures as plain numbers).")
]


def check_format(style: str, *, as_json: bool) -> None:
    """Raise UnknownNameError for an unknown format, UsageError for a format together with --json."""
    if style not in FORMATS:
        raise UnknownNameError("format", style, FORMATS)
    if as_json and style != FORMATS[0]:
        raise UsageError(f"--json and --format {style} are two formats; leave one of them out")


# A workload may follow the pairs: log:FILE and trace:FILE are not among them.
_PAIR = re.compile(r"^(?!trace:|log:)[a-z0-9_]+:[^/]*$", re.IGNORECASE)


def opt(*names: str, help: str, panel: str, complete: Callable[[str], Any] | None = None) -> typer.models.OptionInfo:
    """An option under a heading of ``--help``; ``complete`` returns the names that the shell offers for its value."""
    option: typer.models.OptionInfo = typer.Option(*names, help=help, rich_help_panel=panel, autocompletion=complete)
    return option


def runs_meant(paths: Sequence[Path]) -> list[Path]:
    """The paths, with those of runs for a ``--name``. Raises DataError for what is neither."""
    if all(path.exists() for path in paths):
        return list(paths)
    from ebbench.runs.stored import run_paths

    return run_paths(paths, lambda line: typer.echo(visible(line), err=True))


def _paths_of_named_runs(paths: list[Path] | None) -> list[Path] | None:
    return paths and runs_meant(paths)


RUNS = "Run directories, directories of runs, or --name of runs."
RunPaths = Annotated[list[Path], typer.Argument(help=RUNS, callback=_paths_of_named_runs)]
RunRoots = Annotated[
    list[Path] | None,
    typer.Option(
        "--runs",
        "-r",
        help="Directories, or --name, of runs. Repeatable. Default: runs.",
        callback=_paths_of_named_runs,
    ),
]


def under(panel: str) -> Callable[..., typer.models.OptionInfo]:
    """:func:`opt` under one heading; without a name the option is called as its parameter."""
    return partial(opt, panel=panel)


HELP_ALL = "--help-all"

ALL_PERCENTILES = "Show p90, p95 and p99 of every latency, marked ? if there are too few samples."
AllPercentiles = Annotated[bool, typer.Option("--all-percentiles", help=ALL_PERCENTILES)]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters are groups of options, converted to one parameter per option for typer.

    A group is a dataclass whose fields are declared like typer's parameters, ``name: Annotated[type, opt(...)] =
    default``, or a dictionary annotated with an :class:`OptionSource`.
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if isinstance(kind, type) and is_dataclass(kind)}
    of_runs = {
        name: marker
        for name, kind in hints.items()
        for marker in getattr(kind, "__metadata__", ())
        if hasattr(marker, "take")
    }

    def options(own: inspect.Parameter) -> list[inspect.Parameter]:
        if own.name in of_runs:
            source: OptionSource = of_runs[own.name]
            return source.parameters()
        return _parameters(groups[own.name]) if own.name in groups else [own.replace(annotation=hints[own.name])]

    parameters = [option for own in inspect.signature(command).parameters.values() for option in options(own)]

    def call(**given: Any) -> None:
        made: dict[str, Any] = {name: marker.take(given["context"], given) for name, marker in of_runs.items()}
        made |= {
            name: group(**{member.name: given.pop(member.name) for member in fields(group)})
            for name, group in groups.items()
        }
        command(**made, **given)

    flat: Any = call
    flat.__name__, flat.__doc__ = command.__name__, command.__doc__
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    flat.__signature__ = inspect.Signature(
        [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    )
    return call


def _parameters(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]


class OptionSource(Protocol):
    """Marks a command's parameter, a dictionary made of several options; the command also needs a parameter
    ``context``."""

    def parameters(self) -> list[inspect.Parameter]:
        """One parameter per option."""
        ...

    def take(self, context: typer.Context, given: dict[str, Any]) -> dict[str, Any]:
        """Remove the options' values from ``given``; returns what the command gets. Raises UsageError."""
        ...


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
        chosen = [param for param in params if not self.everyday or ctx.meta.get(HELP_ALL) or _is_everyday(self, param)]
        if len(chosen) < len(params):
            shown.epilog = f"{len(params) - len(chosen)} more options: `{ctx.command_path} {HELP_ALL}`."
        shown.params = [_readable(param) for param in chosen]
        shown.add_help_option = False  # already among them
        with _names_uncut():
            super(ShownWhole, shown).format_help(ctx, formatter)  # type: ignore[misc]


def _is_everyday(command: ShownWhole, param: Any) -> bool:
    return not isinstance(param, TyperOption) or param.name in command.everyday or param.name == "help"


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


def refuse_repeats(command: Any) -> None:
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
        refuse_repeats(below)


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
