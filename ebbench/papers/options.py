"""Options of ``ebbench tables`` and ``ebbench figures``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from ebbench.config.declare import DEFAULT_DEVICE, DEFAULT_MODEL, OUTPUT, Setting, check_ranges, declare, parse_values
from ebbench.config.options import under
from ebbench.errors import UnknownNameError, UsageError

Outputs = Literal["forced", "profile"]
CHOICE = "What to run"
of_runs, choice = under("Runs"), under(CHOICE)
MakeMissing = Annotated[bool, of_runs("--run", help="Execute the missing runs.")]
Stored = Annotated[Path, of_runs("--runs", help="Directory of stored runs.")]
Workers = Annotated[int | None, of_runs("--workers", help="Processes. Default: one per core.")]
Quiet = Annotated[bool, under(OUTPUT)("--quiet", "-q", help="No progress.")]
DEFAULT_FOLDER = Path("runs/papers")


def read_policies(names: Sequence[str]) -> dict[str, Any]:
    """``--policy``, once or repeated. Raises UsageError."""
    from ebbench.runs.prepare import parse_policies

    return {"policies": tuple(spec.name for spec in parse_policies(names))}


def _targets(name: str, option: str) -> Any:
    """Reads numbers such as ``2,5,10``."""
    about = Setting("", above=0, infinite=True, example="2,5,10")
    return lambda text: {name: parse_values(option, text, about)}


def _several(option: str) -> Any:
    return declare((), "Repeat for several.", CHOICE, names=(f"--{option}",), complete=f"{option}s", text=list[str])


@dataclass(frozen=True)
class PaperOptions:
    """Options that override those of a table's own protocol; empty means: as in the paper.

    ``outputs``: output lengths fixed as in the published scripts, or drawn from the workload's profile.
    """

    devices: tuple[str, ...] = _several("device")
    models: tuple[str, ...] = _several("model")
    workloads: tuple[str, ...] = _several("workload")
    policies: tuple[str, ...] = declare(
        (), "Policies in addition to the table's own.", CHOICE, names=("--policy", "-p"), complete="policies",
        text=list[str], read=read_policies,
    )  # fmt: skip
    num_prompts: int | None = declare(
        None, "Fewer requests per run than the paper's, for a quick look.", CHOICE, names=("--num-prompts", "-n"),
        at_least=1,
    )  # fmt: skip
    seeds: int | None = declare(
        None, "Runs per cell, for tables 10, 11, 13 and e3. Default: 1; e3 takes 3 or more.", CHOICE, at_least=1
    )
    grid: bool = declare(
        False, "Search each scheduler's best B and N instead of using the published ones.", CHOICE, names=("--grid",)
    )
    outputs: Outputs = declare(
        "forced", "forced (outputs as long as the scripts' limits) or profile (table 9).", CHOICE, text=str
    )
    source: str = declare(
        "profile", "Lengths of tables 9 and 12: profile, hub, auto, or file:PATH (a copy of one data set).", CHOICE
    )
    ttft_s: tuple[float, ...] = declare(
        (), "TTFT targets in s, e.g. 2,5,10.", CHOICE, names=("--ttft",), text=str, read=_targets("ttft_s", "--ttft")
    )
    tpot_ms: tuple[float, ...] = declare(
        (), "TPOT targets in ms, e.g. 50,100.", CHOICE, names=("--tpot",), text=str,
        read=_targets("tpot_ms", "--tpot"),
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_ranges(self)

    def device(self, default: str = DEFAULT_DEVICE) -> str:
        """The device of an experiment for one device. Raises UsageError if several were given."""
        return _one("--device", self.devices, default)

    def model(self, default: str = DEFAULT_MODEL) -> str:
        """The model of an experiment for one model. Raises UsageError if several were given."""
        return _one("--model", self.models, default)

    def further(self, *own: str) -> tuple[str, ...]:
        """The policies asked for in addition to a table's own, each once."""
        return tuple(dict.fromkeys(policy for policy in self.policies if policy not in own))

    def seed_range(self, least: int = 1) -> range:
        """Seeds of an experiment that repeats its runs at least ``least`` times. Raises UsageError for fewer."""
        if self.seeds is not None and self.seeds < least:
            raise UsageError(f"--seeds must be at least {least} here, for an interval over the runs, not {self.seeds}")
        return range(self.seeds or least)

    def check_names(self, workloads: Collection[str] = ()) -> None:
        """Raise UsageError for an unknown device, model or workload, a workload that is not among ``workloads``, and a
        file of one data set that would stand for several."""
        from ebbench.devices.profiles import find_model, find_profile
        from ebbench.workloads.options import is_recorded
        from ebbench.workloads.spec import load_workload

        if self.source.startswith("file:") and len(self.workloads) != 1:
            raise UsageError(f"--source {self.source} holds one data set; name it with one --workload")
        for device in self.devices:
            find_profile(device)
        for model in self.models:
            find_model(model)
        for workload in self.workloads:
            if workloads and workload not in workloads:
                raise UnknownNameError("workload of this experiment", workload, workloads)
            if not is_recorded(workload):  # a trace file is read when the runs are made
                load_workload(workload)


def _one(option: str, names: Sequence[str], default: str) -> str:
    if len(names) > 1:
        raise UsageError(f"this experiment takes one {option}, not {' and '.join(names)}")
    return names[0] if names else default
