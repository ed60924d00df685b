"""Options of commands that make runs: a run's settings and those of the command itself."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ebbench.config.declare import CLUSTER, LIMITS, Declared, declared_in
from ebbench.config.options import OptionsOf, completing, opt, option_of
from ebbench.process.command_line import GoodputCommand
from ebbench.spec.run import known_settings

WorkloadArgument = Annotated[
    str,
    typer.Argument(
        help="A workload (`ebbench workloads list`), log:FILE, or several with shares.",
        autocompletion=completing("workloads"),
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
        "attainment", "by", "precision", "output_dir", "plot", "as_json", "quiet", "dry", "name",
    ))  # fmt: skip


@dataclass(frozen=True)
class RunSettings(OptionsOf):
    """Marks a command's parameter that takes settings of a run: a dictionary of those that are given, by name.

    ``but``: settings that the command does not take, or takes in another way; ``also``: a class that declares settings
    of the command itself, which come last unless ``only`` names them.
    """

    but: Collection[str] = ()
    also: type | None = None

    def declared(self, kind: Any) -> list[Declared]:
        """The settings that become options."""
        own = {} if self.also is None else declared_in(self.also)
        known = {**known_settings(), **own}
        names = self.only or [name for name in known if name not in (*self.but, *own)]
        chosen = [known[name] for name in (*names, *(name for name in own if name not in names))]
        return [member for member in chosen if member.option is not None]


def setting(name: str, panel: str | None = None) -> typer.models.OptionInfo:
    """The option of a declared setting, for a command that takes it under its own name."""
    return option_of(known_settings()[name], panel)
