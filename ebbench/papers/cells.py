"""One cell of a published table: a single run, named by everything that determines its result."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import ebbench
import vllm_eb
from ebbench.devices.base import Device
from ebbench.devices.linear import LinearCost
from ebbench.engines.base import Engine, EngineOptions, EngineResult
from ebbench.engines.sim import SimEngine
from ebbench.papers.protocols import ASYNC_SCHEDULING, Protocol, build
from ebbench.records.plan import Plan
from ebbench.records.run import slug
from ebbench.resources import bundled_dir
from vllm_eb.calibration import Calibration

Setting = tuple[str, str | int | float]
LINEAR = "linear:"
_OF_FILES = ("trace:", "file:")
_CODE = (
    "simulation", "devices", "workloads", "traffic", "engines/sim.py", "engines/simulated.py", "analysis/metrics.py",
)  # fmt: skip
_SUFFIXES = frozenset({".py", ".toml", ".csv", ".parquet"})


@dataclass(frozen=True)
class Cell:
    """One run. ``workload`` and ``scenario`` are names, paths or ``reference:PATH`` (as a published run had it);
    ``device`` a name or ``linear:alpha_p,beta_p,alpha_d,beta_d,KV`` (linear costs in seconds, and KV tokens).

    ``settings`` are further arguments of build_plan, sorted by name. ``shuffle`` mixes the order of the requests.
    ``weight`` orders the work (longest first) and is no part of the identity.
    """

    workload: str
    policy: str
    device: str
    model: str
    max_num_seqs: int
    max_num_batched_tokens: int
    scenario: str | None = None
    settings: tuple[Setting, ...] = ()
    seed: int = 0
    prefix_caching: bool = True
    warmup: int = 0
    async_scheduling: bool = True
    shuffle: bool = False
    weight: float = field(default=1.0, compare=False)

    @property
    def options(self) -> EngineOptions:
        """Scheduler settings; a length limit that the plan keeps is the server's too."""
        limit = dict(self.settings).get("max_model_len", EngineOptions.max_model_len)
        return EngineOptions(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=int(limit),
            enable_prefix_caching=self.prefix_caching,
            async_scheduling=self.async_scheduling,
            warmup=self.warmup,
        )

    def key(self) -> str:
        """Sixteen hex digits over the cell, the files it names and the code that computes it."""
        identity = {name: value for name, value in asdict(self).items() if name != "weight"}
        source = str(dict(self.settings).get("source", ""))
        named = (self.workload, self.scenario or "", self.model, source)
        files = [_content(name) for name in named if name.startswith(_OF_FILES) or name.endswith((".toml", ".json"))]
        text = json.dumps([identity, files, code_fingerprint()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def directory_name(self) -> str:
        """A name a person can find it by, and the key."""
        words = (self.device, self.model, self.scenario or "", self.workload, self.policy)
        return f"{slug('-'.join(word for word in words if word))[:60]}-{self.key()}"

    def plan(self) -> Plan:
        """Build the request plan. Raises what build_plan raises."""
        return _plan(self.workload, self.scenario, self.settings, self.seed, self.shuffle)

    def engine(self) -> Engine:
        """What runs it."""
        return SimEngine()

    def further_figures(self, result: EngineResult) -> dict[str, Any]:
        """Figures that a summary does not have."""
        return {}

    def load_device(self) -> Device:
        """The emulated device, its KV cache sized for these scheduler settings."""
        return _device(self.device, self.model, self.max_num_seqs, self.max_num_batched_tokens, self.async_scheduling)


def settings(**values: str | int | float | None) -> tuple[Setting, ...]:
    """Arguments of build_plan in the form a cell keeps; None is left out."""
    return tuple(sorted((name, value) for name, value in values.items() if value is not None))


def protocol_cells(
    protocol: Protocol, device: str, model: str, num_prompts: int | None = None, weight: float = 1.0
) -> tuple[Cell, ...]:
    """The runs behind one published figure; ``num_prompts`` replaces the protocol's count."""
    cells = []
    for plan in protocol.plans():
        arguments: dict[str, Any] = dict(plan) | ({} if num_prompts is None else {"num_prompts": num_prompts})
        workload, scenario = arguments.pop("workload"), arguments.pop("scenario", None)
        cell = Cell(
            workload, protocol.policy, device, model, protocol.max_num_seqs, protocol.max_num_batched_tokens,
            scenario=scenario, settings=settings(**arguments), warmup=protocol.warmup,
            async_scheduling=ASYNC_SCHEDULING, shuffle=protocol.shuffle, weight=weight,
        )  # fmt: skip
        cells.append(cell)
    return tuple(cells)


@cache
def _plan(workload: str, scenario: str | None, chosen: tuple[Setting, ...], seed: int, shuffle: bool) -> Plan:
    arguments: dict[str, Any] = {"source": "profile", **dict(chosen)}
    if workload.startswith("trace:"):
        arguments["source"] = "auto"
    arguments |= {"workload": workload, "scenario": scenario}
    return build(arguments, seed, shuffle=shuffle)


@cache
def _device(name: str, model: str, max_num_seqs: int, max_num_batched_tokens: int, async_scheduling: bool) -> Device:
    from ebbench.devices import load_device

    if name.startswith(LINEAR):
        return _linear_device(name, model)
    return load_device(
        name, model, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
        async_scheduling=async_scheduling,
    )  # fmt: skip


def _linear_device(name: str, model: str) -> Device:
    alpha_p, beta_p, alpha_d, beta_d, kv_tokens = (float(value) for value in name.removeprefix(LINEAR).split(","))
    costs = Calibration(alpha_p, beta_p, alpha_d, beta_d)
    return Device("linear", model, LinearCost(costs), int(kv_tokens), costs, "linear cost model, constants as given")


@cache
def code_fingerprint() -> str:
    """Hash of every file that determines a simulated result: a changed model must not be answered from the cache."""
    package = Path(ebbench.__file__).resolve().parent
    roots = [package / part for part in _CODE]
    roots += [Path(vllm_eb.__file__).resolve().parent, bundled_dir("workloads"), bundled_dir("scenarios")]
    roots += [bundled_dir("reference") / folder for folder in ("workloads", "scenarios")]
    digest = hashlib.sha256()
    for root in roots:
        for path in sorted(root.rglob("*")) if root.is_dir() else [root]:
            if path.suffix in _SUFFIXES:
                digest.update(path.name.encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _content(name: str) -> str:
    path = Path(name.removeprefix("trace:").removeprefix("file:")).expanduser()
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
