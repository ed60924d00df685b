"""What commands are asked: which settings of a run they take, and settings of their own, declared alike.

Of these come their options, the keys of their files, and the keywords of Python.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from ebbench.config.declare import (
    CLUSTER,
    LIMITS,
    LOAD,
    OUTPUT,
    SEARCH,
    Declared,
    Setting,
    declare,
    declared_in,
    parse_values,
)
from ebbench.config.options import OptionsOf, completing, opt, option_of
from ebbench.process.command_line import GoodputCommand
from ebbench.spec.run import known_settings, read_goodput
from ebbench.spec.server import ONLY_SIMULATED

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


ADVICE, CANDIDATES = "Options", "Candidates"
GRID, EFFORT = "Grid of step times", "How much is measured"

DEFAULTS: Mapping[str, Any] = {"engine": "auto"}
"""Defaults of commands that run on any engine; a run's own defaults are the simulator's."""
OF_A_SERVER = (
    "assume_decoder", "assume_kernels", "max_model_len", "gpu_memory_utilization", "quantization", "kv_cache_dtype",
    "moe_backend", *ONLY_SIMULATED, "scheduling_policy",
)  # fmt: skip
"""Settings of a simulated server besides its device, model and the limits of its scheduler."""
OF_TRAFFIC = (
    "scenario", "max_concurrency", "request_rate", "saturation_rate", "speed", "time_unit", "source", "columns",
    "input_len", "output_len", "length_distribution", "drop_too_long",
)  # fmt: skip
"""Settings that say which requests are sent, and when, as `ebbench advise` takes them."""
OF_A_PLAN = (
    "seed", "source", "tokenizer", "columns", "keep_text", "prefix_share", "prefix_groups", "cache_hit_rate",
    "input_len", "output_len", "length_distribution", "drop_too_long", "model",
    *OF_A_SERVER,
)  # fmt: skip
"""Settings that `ebbench plan` takes as a run does: which requests are sent, and to what server."""
SET_BY_SEARCH = (
    "scenario", "max_concurrency", "request_rate", "saturation_rate", "rate_scale", "speed", "time_unit", "duration_s",
    "think_time", "tool_time", "tool_share", "sub_agents", "abandon_after", "thinking_len", "lora_assignment", "images",
)  # fmt: skip
"""Settings that a search of `ebbench capacity` does not take: it sets the load."""
_GOODPUT = "Limits in ms: ttft:2000 tpot:50 e2el:9000, met by --attainment of the requests; or ttft:p99:2000."
_ARRIVALS = "Arrivals: poisson (default), gamma, constant, or trace: a log's or fitted workload's own, scaled."


def read_loads(text: str) -> dict[str, tuple[int, ...]]:
    """``64,256``. Raises UsageError."""
    return {
        "loads": tuple(sorted(set(parse_values("--loads", text, Setting("", at_least=1, kind=int, example="64,256")))))
    }


@dataclass(frozen=True)
class RunCommand:
    """What ``ebbench run`` does with a run: how often it runs each policy, and where results go."""

    repeats: int | str = declare(
        "1", "Runs per policy, seeds S, S+1, ...; auto: until one policy is clearly better, at most --max-repeats.",
        LOAD, text=str,
    )  # fmt: skip
    max_repeats: int = declare(30, "Most repeats with --repeats auto.", LOAD)
    price_per_hour: float | None = declare(
        None, "Price of everything that serves; gives cost per million tokens.", OUTPUT
    )
    output_dir: str | None = declare(
        None, "Directory to create for the results.", OUTPUT, names=("--output-dir", "-o"), text=Path
    )
    save_as_vllm: str | None = declare(
        None, "Write the result also as `vllm bench serve` does (JSON).", OUTPUT, text=Path
    )


@dataclass(frozen=True, kw_only=True)
class LimitedCommand:
    """A command that keeps latencies within limits."""

    goodput: str = declare("", _GOODPUT, LIMITS, text=list[str], read=read_goodput)
    attainment: float = declare(0.95, "Share of the requests that must meet the limits.", LIMITS)


@dataclass(frozen=True, kw_only=True)
class SearchCommand(LimitedCommand):
    """What ``ebbench capacity`` searches for, and how."""

    by: str = declare("rate", "rate (sessions/s, open loop) or concurrency (closed loop).", SEARCH)
    scenario: str | None = declare(
        None, _ARRIVALS, SEARCH, names=("--scenario", "-s"), complete="scenarios",
    )  # fmt: skip
    precision: float = declare(0.02, "Stop when half of the 95 % interval is at most this share.", SEARCH)
    max_probes: int = declare(40, "Most runs per policy.", SEARCH)
    max_time: float | None = declare(None, "Most seconds for the whole command.", SEARCH, infinite=True)
    output_dir: str | None = declare(
        None, "Directory of the probes; an existing search continues.", OUTPUT, names=("--output-dir", "-o"), text=Path
    )


@dataclass(frozen=True, kw_only=True)
class PlanCommand(LimitedCommand):
    """The load that ``ebbench plan`` serves, and the candidates from which it chooses."""

    request_rate: float = declare(help="Sessions/s to serve.", panel=LIMITS)
    scenario: str | None = declare(None, _ARRIVALS, LIMITS, names=("--scenario", "-s"), complete="scenarios")
    headroom: float = declare(0.0, "Carry this share more than the rate, too: 0.2 is 120 %.", LIMITS)
    spare: int = declare(0, "Replicas that may be lost at the rate; 1 is N+1.", LIMITS)
    device: tuple[str, ...] = declare(
        (), "GPUs to choose from; repeat. Default: all with data.", CANDIDATES, complete="devices", text=list[str]
    )
    tp: tuple[int, ...] = declare((), "GPUs per instance; repeat. Default: 1 2 4 8.", CANDIDATES, text=list[int])
    instance: tuple[str, ...] = declare(
        (), "Sharing its experts: tp=8,ep=8 or dp=8,ep=8; repeat. Without --tp: only these.", CANDIDATES, text=list[str]
    )
    policy: tuple[str, ...] = declare(
        (),
        "Repeat. Default: v1, ebplus, marginal.",
        CANDIDATES,
        names=("--policy", "-p"),
        complete="policies",
        text=list[str],
    )
    max_num_batched_tokens: tuple[int, ...] = declare(
        (), "B; repeat. Default: vLLM's on the GPU.", CANDIDATES, text=list[int]
    )
    max_num_seqs: tuple[int, ...] = declare((), "N; repeat. Default: vLLM's on the GPU.", CANDIDATES, text=list[int])
    price: tuple[str, ...] = declare(
        (), "Per GPU-hour: h200=3.5, or a TOML file. Default: the fewest GPUs.", CANDIDATES, text=list[str]
    )


@dataclass(frozen=True, kw_only=True)
class GridCommand:
    """A command that measures a grid of step times; sizes in increasing order, separated by commas."""

    tokens: str | None = declare(None, "Prompt tokens per step, e.g. 256,1024,4096.", GRID)
    seqs: str | None = declare(None, "Decoding sequences per step, e.g. 16,128,512.", GRID)
    contexts: str | None = declare(None, "KV tokens per decode, e.g. 128,1024.", GRID)


@dataclass(frozen=True, kw_only=True)
class ValidationCommand(GridCommand):
    """How much ``ebbench validate`` measures."""

    loads: tuple[int, ...] = declare(
        (), "Open requests, e.g. 64,256. Default: derived from --seqs.", EFFORT, text=str, read=read_loads
    )
    rounds: int = declare(
        3, "Number of times each run is measured; fewer if time is short. More in a later call add to it.", EFFORT
    )
    max_time: float = declare(1200.0, "Most seconds for this call; the same command continues later.", EFFORT)
    run_time: float = declare(40.0, "Most seconds per run, approximately.", EFFORT)


@dataclass(frozen=True, kw_only=True)
class AdviceCommand:
    """What ``ebbench advise`` tries, and how often."""

    max_num_batched_tokens: tuple[int, ...] = declare(
        (), "Token budgets to try; repeat, the one to compare with first. Default: vLLM's, 8192, 2048, 4096 and 16384, "
        "as far as they hold --max-num-seqs.", ADVICE, text=list[int],
    )  # fmt: skip
    num_prompts: int | None = declare(
        None, "Requests per run. Default: 3,000; of a log all, up to 10,000 per seed.", ADVICE,
        names=("--num-prompts", "-n"),
    )  # fmt: skip
    goodput: str = declare(
        "", "Targets in ms: ttft:10000 tpot:100. Goodput then decides.", ADVICE, text=list[str], read=read_goodput
    )
    policy: tuple[str, ...] = declare(
        (), "Candidates. Default: those that the policies name, rivals of other servers among them.", ADVICE,
        names=("--policy", "-p"), complete="policies", text=list[str],
    )  # fmt: skip
    seeds: int = declare(5, "Number of plans on which each candidate is run.", ADVICE)
    tp: int = declare(1, "GPUs that share the model by tensor parallelism.", CLUSTER)
    topology: str | None = declare(
        None, "Several engines, each with the policy: dp=4, tp=1,dp=4,ep=4, ... or a TOML file.", CLUSTER
    )


C = TypeVar("C")


def asked_of(command: type[C], asked: Mapping[str, Any]) -> tuple[C, dict[str, Any]]:
    """What is asked of a command itself, with its defaults, and the other settings: those of a run."""
    own = declared_in(command)
    chosen = {name: value for name, value in asked.items() if name in own}
    return command(**chosen), {name: value for name, value in asked.items() if name not in own}
