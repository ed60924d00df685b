"""Options of commands that make runs, derived from the declarations of a run's settings; what these commands share."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from ebbench.cli import completion
from ebbench.cli.options import GoodputCommand, opt
from ebbench.config.declare import CLUSTER, LIMITS, Declared, declared_in
from ebbench.spec.run import known_settings

WorkloadArgument = Annotated[
    str,
    typer.Argument(
        help="A workload (`ebbench workloads list`), log:FILE, or several with shares.",
        autocompletion=completion.workloads,
    ),
]
VllmOptions = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="-- VLLM_OPTIONS",
        help="With --engine vllm, after --: options for `vllm serve`.",
        show_default=False,
    ),
]
Goodput = Annotated[
    list[str] | None,
    opt(
        "--goodput",
        help="Limits in ms: ttft:2000 tpot:50 e2el:9000, met by --attainment of the requests; or ttft:p99:2000.",
        panel=LIMITS,
    ),
]
Attainment = Annotated[
    float, opt("--attainment", help="Share of the requests that must meet the limits.", panel=LIMITS)
]
Tp = Annotated[int, opt("--tp", help="GPUs that share the model by tensor parallelism.", panel=CLUSTER)]


class RunsCommand(GoodputCommand):
    """A command that makes runs; its help shows the options that one needs every day."""

    everyday = frozenset((
        "policy", "engine", "device", "model", "max_num_seqs", "max_num_batched_tokens", "scenario", "max_concurrency",
        "request_rate", "num_prompts", "seed", "source", "input_len", "output_len", "topology", "goodput", "repeats",
        "attainment", "by", "precision", "output_dir", "plot", "as_json", "quiet", "dry_run", "name",
    ))  # fmt: skip


@dataclass(frozen=True)
class RunSettings:
    """Marks a command's parameter that takes settings of a run: a dictionary of those that are given, by name.

    ``defaults``: shown where they are not those of a run. ``but``: settings that the command does not take, or takes in
    another way; ``only``: all that it takes. ``also``: a class that declares settings of the command itself.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    but: Collection[str] = ()
    only: Collection[str] = ()
    also: type | None = None

    def declared(self) -> list[Declared]:
        """The settings that become options."""
        known = known_settings()
        own = {} if self.also is None else declared_in(self.also)
        names = self.only or [name for name in known if name not in (*self.but, *own)]
        return [*(known[name] for name in names if known[name].option is not None), *own.values()]

    def parameters(self) -> list[inspect.Parameter]:
        """One parameter per option."""
        return [
            _parameter(declared, self.defaults.get(declared.name, declared.default)) for declared in self.declared()
        ]

    def take(self, context: typer.Context, given: dict[str, Any]) -> dict[str, Any]:
        """Remove the options from ``given``; returns the settings by name. Raises UsageError."""
        settings: dict[str, Any] = {}
        for declared in self.declared():
            value, option = given.pop(declared.name), declared.option
            if option is None or not is_given(context, declared.name):
                continue
            if option.read is not None:
                settings |= option.read(value)
            elif isinstance(value, Path):
                settings[declared.name] = str(value)  # as a file has it
            else:
                settings[declared.name] = not value if option.turns_off else value
        return settings


def is_given(context: typer.Context, name: str) -> bool:
    """Whether a parameter is on the command line, not at its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _parameter(declared: Declared, default: Any) -> inspect.Parameter:
    about, kind = declared.option, declared.kind
    assert about is not None  # the caller has chosen those with an option
    if about.text is not None:
        kind, default = about.text | None, default if about.text is str and isinstance(default, str) else None
    elif about.turns_off:
        kind, default = bool, False
    annotation: Any = Annotated[kind, _option(declared)]
    return inspect.Parameter(declared.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def setting(name: str, panel: str | None = None) -> typer.models.OptionInfo:
    """The option of a declared setting, for a command that takes it under its own name."""
    return _option(known_settings()[name], panel)


def _option(declared: Declared, panel: str | None = None) -> typer.models.OptionInfo:
    assert declared.option is not None, f"{declared.name} has no option"
    complete = getattr(completion, declared.option.complete) if declared.option.complete else None
    names = declared.option.names or declared.option_names
    return opt(*names, help=declared.about.help, panel=panel or declared.option.panel, complete=complete)
