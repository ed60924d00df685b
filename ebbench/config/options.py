"""Options of commands, made of declared settings; the names that the shell offers for their values.

Nothing heavy is imported here: `ebbench --help` and every key press of shell completion load this module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, is_dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from ebbench.config.declare import Declared, declared_in, option_name
from ebbench.errors import UsageError, check_known
from ebbench.installation import bundled_dir

# What the shell offers. If no name matches, it offers files.

_DEVICES = Path(__file__).resolve().parents[1] / "devices" / "data"


def _stems(directory: Path) -> list[str]:
    return sorted(path.stem for path in directory.glob("*.toml"))


def _api_servers() -> list[str]:
    return [*_stems(_DEVICES / "api_servers"), "off"]


def _models() -> list[str]:
    import tomllib

    return sorted(tomllib.loads((_DEVICES / "models.toml").read_text(encoding="utf-8")))


COMPLETIONS: Mapping[str, Callable[[], Iterable[Any]]] = {
    "workloads": lambda: [*_stems(bundled_dir("workloads")), "log:", "trace:"],
    "scenarios": lambda: _stems(bundled_dir("scenarios")),
    "policies": lambda: import_module("vllm_eb.policy").descriptions().items(),
    "dispatch": lambda: import_module("ebbench.dispatch").DESCRIPTIONS.items(),
    "engines": lambda: ("auto", "sim", "emulated", "vllm", "http://"),
    "devices": lambda: _stems(_DEVICES / "profiles"),
    "api_servers": _api_servers,
    "api_servers_or_auto": lambda: [*_api_servers(), "auto"],
    "models": _models,
}
"""Names by what they are of; policies with their descriptions."""


def completing(kind: str) -> Callable[[str], list[Any]]:
    """The function that typer calls for the names of :data:`COMPLETIONS` with a beginning."""

    def offered(incomplete: str) -> list[Any]:
        named = ((name if isinstance(name, str) else name[0], name) for name in COMPLETIONS[kind]())
        return [name for word, name in named if word.startswith(incomplete)]

    return offered


# Options.


def opt(*names: str, help: str, panel: str | None = None, complete: str = "") -> typer.models.OptionInfo:
    """An option under a heading of ``--help``; ``complete``: what the shell offers, of :data:`COMPLETIONS`."""
    offered = completing(complete) if complete else None
    option: typer.models.OptionInfo = typer.Option(*names, help=help, rich_help_panel=panel, autocompletion=offered)
    return option


def under(panel: str) -> Callable[..., typer.models.OptionInfo]:
    """:func:`opt` under one heading; without a name the option is called as its parameter."""
    return partial(opt, panel=panel)


def option_of(declared: Declared, panel: str | None = None) -> typer.models.OptionInfo:
    """The option of a declared setting, under its own heading or another."""
    assert declared.option is not None, f"{declared.name} has no option"
    names = declared.option.names or declared.option_names
    return opt(
        *names, help=declared.about.help, panel=panel or declared.option.panel, complete=declared.option.complete
    )


@dataclass(frozen=True)
class OptionsOf:
    """Marks a parameter of a :func:`grouped` command that is made of several options: those that its class declares.

    In place of what is declared, by name: ``defaults``, ``helps`` and ``completes``; ``panel``: of those that
    ``only`` names, which are all that are taken.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    helps: Mapping[str, str] = field(default_factory=dict)
    completes: Mapping[str, str] = field(default_factory=dict)
    panel: str = ""
    only: Collection[str] = ()

    def declared(self, kind: Any) -> list[Declared]:
        """The settings that become options."""
        own = declared_in(kind)
        return [own[name] for name in self.only or own if own[name].option is not None]

    def parameters(self, kind: Any) -> list[inspect.Parameter]:
        """One parameter per option."""
        return [self._parameter(self._changed(declared)) for declared in self.declared(kind)]

    def _changed(self, declared: Declared) -> Declared:
        assert declared.option is not None  # declared() has chosen those with an option
        help = declared.about.help
        if self.defaults.get(declared.name) is not None:
            help = help.partition(" Default: ")[0]  # the help page shows it behind the text
        option = replace(
            declared.option, panel=self.panel if self.panel and declared.name in self.only else declared.option.panel,
            complete=self.completes.get(declared.name, declared.option.complete),
        )  # fmt: skip
        return replace(declared, about=replace(declared.about, help=self.helps.get(declared.name, help)), option=option)

    def _parameter(self, declared: Declared) -> inspect.Parameter:
        kind, default, about = declared.kind, self.defaults.get(declared.name, declared.default), declared.option
        assert about is not None  # declared() has chosen those with an option
        if default is MISSING:
            default, kind = inspect.Parameter.empty, about.text or kind
        elif about.text is not None:
            kind, default = about.text | None, default if about.text is str and isinstance(default, str) else None
        elif about.turns_off:
            kind, default = bool, False
        annotation: Any = Annotated[kind, option_of(declared)]
        return inspect.Parameter(declared.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    def take(self, kind: Any, context: typer.Context, given: dict[str, Any]) -> Any:
        """Remove the options' values from ``given``; returns an object of the class, or what is given, by name.

        Raises UsageError.
        """
        settings: dict[str, Any] = {}
        for declared in self.declared(kind):
            value = given.pop(declared.name)
            if is_given(context, declared.name):
                settings |= _settings_of(declared, value)
        return settings if kind is dict or not isinstance(kind, type) else kind(**{**self.defaults, **settings})


def _settings_of(declared: Declared, value: Any) -> Mapping[str, Any]:
    """What an option's value sets, by name: as a file has it."""
    option = declared.option
    assert option is not None  # the value is an option's
    if option.read is not None:
        return option.read(value)
    if option.turns_off:
        value = not value
    elif isinstance(value, Path) and option.text is Path:
        value = str(value)
    elif isinstance(value, list) and get_origin(declared.kind) is tuple:
        value = tuple(value)
    return {declared.name: value}


def is_given(context: typer.Context, name: str) -> bool:
    """Whether a parameter is on the command line, not at its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters are made of several options, converted to one parameter per option for typer.

    Such a parameter is annotated with a class whose fields are declared, or with a marker: :class:`OptionsOf`.
    """
    hints, own = get_type_hints(command, include_extras=True), inspect.signature(command).parameters
    groups = {name: group for name in own if (group := _group_of(hints[name])) is not None}
    parameters: dict[str, inspect.Parameter] = {}
    for name, own_parameter in own.items():
        kind, marker = groups.get(name, (None, None))
        several = [own_parameter.replace(annotation=hints[name])] if marker is None else marker.parameters(kind)
        parameters |= {shown.name: shown.replace(kind=inspect.Parameter.KEYWORD_ONLY) for shown in several}
    parameters.setdefault(
        "context", inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    )

    def call(context: typer.Context, **given: Any) -> None:
        made = {name: marker.take(kind, context, given) for name, (kind, marker) in groups.items()}
        command(**made, **given, **({"context": context} if "context" in own else {}))

    flat: Any = call
    flat.__name__, flat.__doc__ = command.__name__, command.__doc__
    flat.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    flat.__signature__ = inspect.Signature(list(parameters.values()))
    return call


def _group_of(hint: Any) -> tuple[Any, OptionsOf] | None:
    """The class and the marker of a parameter that is made of several options; None for another one."""
    kind = get_args(hint)[0] if hasattr(hint, "__metadata__") else hint
    for marker in getattr(hint, "__metadata__", ()):
        if isinstance(marker, OptionsOf):
            return kind, marker
    return (kind, OptionsOf()) if isinstance(kind, type) and is_dataclass(kind) else None


# Refuses options that would have no effect.


def refuse_unused(context: typer.Context, options: Iterable[str], reads: Collection[str], what: str) -> None:
    """Raise UsageError for the first of ``options`` (parameter names) that was given but is not read by ``what``.

    ``reads``: options as users write them, without ``--``.
    """
    read = [option_name(name) for name in reads]
    for option in given_options(context, options):
        if option not in read:
            it = f"it uses {', '.join(read)}" if read else "leave it out"
            raise UsageError(f"{what} does not use {option}; {it}")


def given_options(context: typer.Context, options: Iterable[str]) -> list[str]:
    """The ``options`` (parameter names) that are on the command line, as the user writes them."""
    names = {param.name: _shown(param) for param in context.command.params}
    sources = {option: context.get_parameter_source(option) for option in options}
    return [names[option] for option, source in sources.items() if source and source.name == "COMMANDLINE"]


def _shown(param: Any) -> str:
    return str(param.opts[0] if param.param_type_name == "option" else param.name.upper())


# Options that several commands have.

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
ALL_PERCENTILES = "Show p90, p95 and p99 of every latency, marked ? if there are too few samples."
AllPercentiles = Annotated[bool, typer.Option("--all-percentiles", help=ALL_PERCENTILES)]
FORMATS = ("table", "markdown", "csv")
"""Formats of the commands that show tables of runs."""
Format = Annotated[
    str, typer.Option("--format", "-f", help="table, markdown, or csv (only the tables, figures as plain numbers).")
]


def check_format(style: str, *, as_json: bool) -> None:
    """Raise UnknownNameError for an unknown format, UsageError for a format together with --json."""
    check_known("format", style, FORMATS)
    if as_json and style != FORMATS[0]:
        raise UsageError(f"--json and --format {style} are two formats; leave one of them out")
