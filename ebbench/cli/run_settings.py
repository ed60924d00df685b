"""Options of commands that make runs, derived from the declarations of a run's settings; what these commands share."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ebbench.cli import completion
from ebbench.cli.options import GoodputCommand, opt
from ebbench.config.declare import CLUSTER, Declared
from ebbench.config.topology import TopologySpec
from ebbench.engines.checks import check_counts, check_fits, check_options
from ebbench.errors import UnknownNameError, UsageError
from ebbench.spec.run import known_settings
from ebbench.spec.server import AUTO, EngineOptions, first_choice, is_server, only_if_busy
from vllm_eb.policy import PolicySpec, UnknownPolicyError, descriptions, parse_policy, settings_of

if TYPE_CHECKING:
    from ebbench.runs.prepare import Series


__all__ = [
    "check_counts",
    "check_fits",
    "check_options",
    "default_policies",
    "each_once",
    "is_server",
    "parse_policies",
]


def default_policies(engine: str, topology: TopologySpec | None = None) -> tuple[str, ...]:
    """Policies to run by default; v1 alone on a server, which has its own, and for separate pools, with nothing to
    decide."""
    alone = is_server(engine) or (topology is not None and topology.disaggregated)
    return ("v1",) if alone else ("v1", "ebplus")


def parse_policies(names: Sequence[str]) -> list[PolicySpec]:
    """Policies in the order given. Raises UsageError for a repeated one, UnknownNameError for an unknown kind."""
    specs: list[PolicySpec] = []
    for name in names:
        kind = name.strip().partition(":")[0]
        if "," in kind:
            raise UsageError(f"policy {kind!r}: give each policy its own --policy")
        try:
            spec = parse_policy(name)
        except UnknownPolicyError:
            raise UnknownNameError("policy", kind, descriptions()) from None
        _check_seconds(spec)
        if spec in specs:
            raise UsageError(f"policy {spec.name} is given twice; give each policy once")
        specs.append(spec)
    return specs


def each_once(option: str, values: Sequence[Any]) -> None:
    """Raise UsageError for a value that an option of alternatives lists twice: its results would stand there twice."""
    for place, value in enumerate(values):
        if value in values[:place]:
            raise UsageError(f"{option} {value} is given twice; give it once")


def _check_seconds(spec: PolicySpec) -> None:
    """A policy's targets are in s, --goodput's limits in ms: raise UsageError for a value probably in the other
    unit."""
    for key, about in settings_of(type(spec)).items():
        given, most = getattr(spec, key), about.doubtful_from
        if about.unit == "s" and given is not None and most is not None and given >= most:
            raise UsageError(
                f"policy {spec.name}: {key}={given:g} is in seconds, and {most:,g} s or more is not a valid target; "
                f"for {given:g} ms write {key}={given / 1000:g}"
            )


LIMITS, OUTPUT = "Limits", "Output"

WorkloadArgument = Annotated[
    str,
    typer.Argument(help="A workload (`ebbench workloads list`), or log:FILE.", autocompletion=completion.workloads),
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


DEFAULTS: Mapping[str, Any] = {"engine": "auto", "api_server": "auto"}
"""Defaults of commands that run on any engine; a run's own defaults are the simulator's."""


OF_A_SERVER = (
    "assume_decoder", "max_model_len", "gpu_memory_utilization", "vllm_version", "quantization", "kv_cache_dtype",
    "api_server", "api_server_count",
)  # fmt: skip
"""Settings of a simulated server besides its device, model and the limits of its scheduler."""


class RunsCommand(GoodputCommand):
    """A command that makes runs; its help shows the options that one needs every day."""

    everyday = frozenset((
        "policy", "engine", "device", "model", "max_num_seqs", "max_num_batched_tokens", "scenario", "max_concurrency",
        "request_rate", "num_prompts", "seed", "source", "input_len", "output_len", "topology", "goodput", "repeats",
        "attainment", "by", "precision", "output_dir", "plot", "as_json", "quiet", "dry_run",
    ))  # fmt: skip


@dataclass(frozen=True)
class RunSettings:
    """Marks a command's parameter that takes settings of a run: a dictionary of those that are given, by name.

    ``defaults``: shown where they are not those of a run. ``but``: settings that the command does not take, or takes in
    another way; ``only``: all that it takes.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    but: Collection[str] = ()
    only: Collection[str] = ()

    def declared(self) -> list[Declared]:
        """The settings that become options."""
        known = known_settings()
        names = self.only or [name for name in known if name not in self.but]
        return [known[name] for name in names if known[name].option is not None]

    def parameters(self) -> list[inspect.Parameter]:
        """One parameter per option."""
        return [_parameter(one, self.defaults.get(one.name, one.default)) for one in self.declared()]

    def take(self, context: typer.Context, given: dict[str, Any]) -> dict[str, Any]:
        """Remove the options from ``given``; returns the settings by name. Raises UsageError."""
        settings: dict[str, Any] = {}
        for one in self.declared():
            value, option = given.pop(one.name), one.option
            if option is None or not is_given(context, one.name):
                continue
            if option.read is not None:
                settings |= option.read(value)
            else:
                settings[one.name] = not value if option.turns_off else value
        return settings


def is_given(context: typer.Context, name: str) -> bool:
    """Whether a parameter is on the command line, not at its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _parameter(one: Declared, default: Any) -> inspect.Parameter:
    about, kind = one.option, one.kind
    assert about is not None  # the caller has chosen those with an option
    if about.text is not None:
        kind, default = about.text | None, default if about.text is str and isinstance(default, str) else None
    elif about.turns_off:
        kind, default = bool, False
    annotation: Any = Annotated[kind, setting(one.name)]
    return inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def setting(name: str, panel: str | None = None) -> typer.models.OptionInfo:
    """The option of a declared setting, for a command that takes it under its own name."""
    one = known_settings()[name]
    assert one.option is not None, f"{name} has no option"
    complete = getattr(completion, one.option.complete) if one.option.complete else None
    return opt(*one.option_names, help=one.about.help, panel=panel or one.option.panel, complete=complete)


def _refuse_for_simulator(engine: str, settings: Mapping[str, Any]) -> None:
    """Raise UsageError for settings of the load generator with an engine that sends no requests, defaults too."""
    from ebbench.engines import select_engine
    from ebbench.engines.setup import client_of

    known = known_settings()
    if given := [name for name in settings if known[name].part == "client"]:
        client_of(select_engine(engine)[0], given)


def check_tp(tp: int, link: str | None) -> None:
    """Raise UsageError for a number of GPUs below 1, and for a link of a single GPU."""
    from ebbench.engines.checks import check_counts
    from ebbench.errors import UsageError

    check_counts(tp=tp)
    if link is not None and tp == 1:
        raise UsageError(f"--link {link} joins the GPUs of one server: give --tp too, for example --tp 2")


def series_of(settings: Mapping[str, Any]) -> Series:
    """The series of runs that the command line describes. Raises UsageError.

    ``settings``: the given ones by name; with a list of policies, ``goodput`` as text, and ``vllm_options`` as words.
    """
    from ebbench.devices.capacity import with_batch_limits
    from ebbench.engines import chosen_engine
    from ebbench.engines.setup import topology_of
    from ebbench.runs.prepare import Series
    from ebbench.spec.run import spec_of

    settings = {**DEFAULTS, **settings}
    engine = settings["engine"]
    api_server = settings["api_server"], settings.get("api_server_count")
    policies = settings.get("policy")
    settings = {name: value for name, value in settings.items() if name != "policy"} | {
        "api_server": first_choice(*api_server),
        "vllm_options": tuple(settings.get("vllm_options") or ()),
    }
    _refuse_for_server(engine, settings)
    _refuse_for_simulator(engine, settings)
    limited = with_batch_limits({**settings, "engine": chosen_engine(engine)})
    spec = spec_of({**limited, "engine": engine}, with_text=True)
    topology = topology_of(spec.cluster.topology, spec.plan.scenario, None)
    chosen = parse_policies(policies or default_policies(engine, topology))
    return Series(
        replace(spec, policy=chosen[0].name),
        tuple(chosen),
        policies_stated=bool(policies),
        api_server_if_busy=only_if_busy(*api_server),
    )


def checked_server(model: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """``model`` and ``api_server`` as a simulation takes them. Raises UsageError for settings of OF_A_SERVER that it
    cannot have, before anything is simulated."""
    from ebbench.devices.apiserver import chosen_api_server
    from ebbench.devices.base import quantised, start_up
    from ebbench.devices.profiles import as_decoder, find_model

    name = as_decoder(model) if settings.get("assume_decoder") else model
    quantised(find_model(name), settings.get("quantization"), settings.get("kv_cache_dtype", "auto"))
    count = settings.get("api_server_count")
    api_server = first_choice(settings.get("api_server", AUTO), count)
    chosen_api_server(api_server, count)
    if (version := settings.get("vllm_version")) is not None:
        start_up(version)
    return {"model": name, "api_server": api_server}


def api_server_if_busy(settings: Mapping[str, Any]) -> bool:
    """Whether to simulate again with vLLM's API server where it would be busy."""
    return only_if_busy(settings.get("api_server", AUTO), settings.get("api_server_count"))


def _refuse_for_server(engine: str, settings: Mapping[str, Any]) -> None:
    """Raise UsageError for settings that a server which already runs would not take."""
    from ebbench.engines.checks import refuse_server_settings, refuse_simulated
    from ebbench.runs.file import starts_a_server
    from ebbench.spec.server import is_server

    if is_server(engine):
        known = known_settings()
        refuse_server_settings(engine, [known[name].option_names[0] for name in settings if starts_a_server(name)])
        simulated = ("api_server", "api_server_count", "front_end_ms", "vllm_version")
        refuse_simulated(EngineOptions(**{name: settings[name] for name in simulated if name in settings}), "endpoint")
