"""The server that is simulated, emulated or started: limits, KV cache, data types, API server, host costs, drafts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ebbench.config.declare import DEFAULT_VLLM, ENGINE, LOAD, MOST_SECONDS, check_ranges, declare, declared_in
from ebbench.errors import UnknownNameError, UsageError, check_known

if TYPE_CHECKING:
    from vllm_eb.theory import Drafts

MOST_TOKENS = 32
OPTION = "--speculative"
EXAMPLE = "method=eagle3,tokens=3,acceptance=0.8,0.6,0.4"


@dataclass(frozen=True)
class Method:
    """How drafts are made. ``own_kv``: by layers with a KV cache of their own, which read the target's hidden states:
    vLLM then reserves KV slots ahead of the drafts and computes the last block of a cached prefix again. ``layers``:
    of the drafter; ``head_share``: of the target's vocabulary that it predicts. ``asynchronous``: vLLM can schedule the
    next step before the drafts are known, and otherwise turns asynchronous scheduling off."""

    own_kv: bool
    layers: int
    head_share: float = 1.0
    asynchronous: bool = True


METHODS = {
    "mtp": Method(own_kv=True, layers=1),
    "eagle": Method(own_kv=True, layers=1),
    "eagle3": Method(own_kv=True, layers=1, head_share=0.25),
    "ngram": Method(own_kv=False, layers=0, asynchronous=False),
}
_SYNCHRONOUS = frozenset({"ngram", "medusa", "mlp_speculator", "suffix"})
"""Methods with which vLLM schedules no step before the drafts of the one before are known."""
_ELSEWHERE = (
    "draft_model", "medusa", "mlp_speculator", "suffix", "dflash", "dspark", "ngram_gpu", "custom_class",
    "extract_hidden_states",
)  # fmt: skip


@dataclass(frozen=True)
class Speculative:
    """``tokens`` drafted per decode step, of which ``acceptance[j]`` of the drafts have j + 1 accepted at least.

    This is the rate per position that vLLM reports, so it cannot rise.
    """

    method: str
    tokens: int
    acceptance: tuple[float, ...]

    @property
    def text(self) -> str:
        """The setting with all its values."""
        rates = ",".join(f"{rate:.12g}" for rate in self.acceptance)
        return f"method={self.method},tokens={self.tokens},acceptance={rates}"

    @property
    def rules(self) -> Method:
        """What vLLM does for this method."""
        return METHODS[self.method]

    @property
    def lookahead_tokens(self) -> int:
        """KV slots that vLLM reserves for a sequence beyond the tokens that it schedules."""
        return self.tokens if self.rules.own_kv else 0

    @property
    def theory(self) -> Drafts:
        """As the formulas and the policies take it; the cost of drafting is left to the calibration."""
        from vllm_eb.theory import Drafts

        return Drafts(self.acceptance, lookahead_tokens=self.lookahead_tokens)

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of a decode step per sequence, where no answer ends."""
        return 1.0 + sum(self.acceptance)


def with_acceptance(text: str, rates: Sequence[float]) -> str:
    """The setting, with the rates of a fitted workload where it has none. ``rates`` may be empty."""
    given = _pairs(text)
    if "acceptance" in given or not rates:
        return text
    tokens = _tokens(given.get("tokens"))
    return f"{text},acceptance={','.join(f'{rate:.12g}' for rate in rates[:tokens])}"


@cache
def parse_speculative(text: str) -> Speculative:
    """Read the setting. Raises UsageError."""
    given = _pairs(text)
    method = given.pop("method", None)
    if method is None:
        raise UsageError(f"{OPTION} {text!r}: name the method, one of {', '.join(METHODS)}; for example {EXAMPLE}")
    if method in _ELSEWHERE or method.endswith("_mtp"):
        raise UsageError(f"{OPTION}: method {method} is vLLM's, but not simulated; use {', '.join(METHODS)}")
    check_known("method of speculative decoding", method, METHODS)
    tokens = _tokens(given.pop("tokens", None))
    rates = _acceptance(given.pop("acceptance", None), tokens)
    if given:
        raise UnknownNameError(f"setting of {OPTION}", next(iter(given)), ("method", "tokens", "acceptance"))
    if len(rates) > (most := tokens or MOST_TOKENS):
        raise UsageError(
            f"{OPTION}: acceptance has {len(rates)} rates for {most} drafted tokens; give at most one per token"
        )
    tokens = tokens or len(rates)
    return Speculative(method, tokens, _continued(rates, tokens))


def served_drafts(vllm_options: Sequence[str]) -> dict[str, Any]:
    """vLLM's ``speculative_config`` of a server with these arguments, in whichever way they give it.

    Empty without one, and for what is no JSON object, which vLLM refuses.
    """
    settings: dict[str, Any] = {}
    for word, following in zip(vllm_options, (*vllm_options[1:], ""), strict=False):
        name, _, value = word.partition("=")
        option, _, key = name.replace("_", "-").partition(".")
        key = _SHORT.get(option) or key.replace("-", "_")
        if option in ("--speculative-config", "-sc", *_SHORT):
            read = _json_or_text(value or following)
            settings |= {key: read} if key else read if isinstance(read, dict) else {}
    return settings


def refuse_without_drafts(vllm_options: Sequence[str]) -> None:
    """Raise UsageError for a method of vLLM's ``speculative_config`` that drafts nothing."""
    if served_drafts(vllm_options).get("method") == "extract_hidden_states":
        raise UsageError(
            "--speculative-config: method extract_hidden_states drafts no tokens, it stores what a drafter is trained "
            "with; leave it out, or start `vllm serve` with it and give its URL as --engine"
        )


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


_SHORT = {"--spec-method": "method", "--spec-tokens": "num_speculative_tokens"}


def drafts_synchronously(vllm_options: Sequence[str]) -> bool:
    """Whether a server with these arguments drafts by a method without asynchronous scheduling."""
    drafts = served_drafts(vllm_options)
    return str(drafts.get("method", drafts.get("model", ""))).strip("[]") in _SYNCHRONOUS


def _pairs(text: str) -> dict[str, str]:
    """``a=1,b=2,3`` by name: a part without a name belongs to the one before it."""
    pairs: dict[str, str] = {}
    name = ""
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if equals:
            name = key.strip()
            if name in pairs:
                raise UsageError(f"{OPTION}: {name!r} is given twice")
            pairs[name] = value.strip()
        elif name:
            pairs[name] += f",{part.strip()}"
        else:
            raise UsageError(f"{OPTION} {text!r}: expected name=value, for example {EXAMPLE}")
    return pairs


def _tokens(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 9 or not 1 <= int(text) <= MOST_TOKENS:
        raise UsageError(f"{OPTION}: tokens must be a whole number from 1 to {MOST_TOKENS}, not {text!r}")
    return int(text)


def _acceptance(text: str | None, tokens: int | None) -> tuple[float, ...]:
    """The rates that are given, or those of a file and published ones for as many ``tokens``."""
    if not text:
        raise UsageError(
            f"{OPTION}: give the acceptance rate per position, for example {EXAMPLE}, or run a workload "
            "fitted to a log with them"
        )
    if text.endswith(".json"):
        return _measured(Path(text))[:tokens]
    try:
        rates = tuple(map(_rate, text.split(",")))
    except ValueError:
        known = published_acceptance()
        if text in known:
            return known[text][:tokens]
        raise UsageError(
            f"{OPTION}: acceptance must be rates in [0, 1], a .json file with measured ones, or published ones "
            f"({', '.join(known)}), not {text!r}"
        ) from None
    return _checked(rates)


def _rate(text: str) -> float:
    """A number as JSON has it: Python would read other digits and underscores, too."""
    if not text.isascii() or "_" in text:
        raise ValueError(text)
    return float(text) + 0.0  # not -0


@cache
def published_acceptance() -> dict[str, tuple[float, ...]]:
    """Published rates by name; the file has their sources."""
    from ebbench.foreign.documents import read_toml

    published = read_toml(Path(__file__).with_name("acceptance.toml"))
    return {name: tuple(about["rates"]) for name, about in published.items()}


def _checked(rates: tuple[float, ...]) -> tuple[float, ...]:
    for position, rate in enumerate(rates, 1):
        if not 0.0 <= rate <= 1.0:
            raise UsageError(f"{OPTION}: acceptance at position {position} must lie in [0, 1], not {rate:g}")
    for position, (before, rate) in enumerate(pairwise(rates), 2):
        if rate > before:
            raise UsageError(
                f"{OPTION}: acceptance rises at position {position} from {before:g} to {rate:g}; it is the share of "
                "drafts accepted at least that far, as vLLM reports it, which cannot rise"
            )
    return rates


def _measured(path: Path) -> tuple[float, ...]:
    """``acceptance`` of a JSON file as `ebbench show RUN --json` prints it, or of an object with it.

    The mean per position over several runs.
    """
    from msgspec import ValidationError, convert

    from ebbench.foreign.documents import read_json

    read = read_json(path)
    try:
        runs = [convert(run["acceptance"], list[float]) for run in (read if isinstance(read, list) else [read])]
    except (ValidationError, TypeError, KeyError):
        raise UsageError(
            f"{OPTION}: {path} must be what `ebbench show RUN --json` prints of a run with drafts, or a JSON object "
            'with "acceptance": [0.8, 0.6, ...]'
        ) from None
    if len(lengths := sorted(set(map(len, runs)))) > 1:
        raise UsageError(
            f"{OPTION}: {path} has runs with {lengths[0]} and with {lengths[-1]} drafted tokens; give one of them"
        )
    rates = tuple(sum(position) / len(position) for position in zip(*runs, strict=True))
    if not rates:
        raise UsageError(f"{OPTION}: {path} has no acceptance rates by position")
    return _checked(rates)


def _continued(rates: tuple[float, ...], tokens: int) -> tuple[float, ...]:
    """The rates of all positions: further drafted tokens are accepted as often, given those before, as the last one."""
    before = rates[-2] if len(rates) > 1 else 1.0
    share = rates[-1] / before if before else 0.0
    continued = list(rates)
    while len(continued) < tokens:
        continued.append(continued[-1] * share)
    return tuple(continued)


# The free constants of a device and model, which a run may replace.


@dataclass(frozen=True)
class HostCosts:
    """The free constants of a device and model (at most four), with their source and whether they were fitted.

    With several GPUs per unit the engine sends every step to a process per GPU: ``workers_step_s`` and
    ``workers_sequence_s`` are added.

    ``mixed_excess`` scales the part of a mixed attention call that exceeds its pure parts; 1 is as profiled.
    ``request_s`` is not a free constant: `ebbench calibrate` measures it together with a grid of step times.
    ``doubt``: what speaks against the constants, said where the host decides; "" for nothing.
    """

    step_s: float
    sequence_s: float
    mixed_excess: float = 1.0
    source: str = "default, not fitted"
    request_s: float = 0.0
    fitted: bool = True
    doubt: str = ""
    workers_step_s: float = 0.0
    workers_sequence_s: float = 0.0

    def with_workers(self, tp: int) -> HostCosts:
        """The constants of a unit of ``tp`` GPUs, without a part that depends on them."""
        several = tp > 1
        step_s = self.step_s + several * self.workers_step_s
        sequence_s = self.sequence_s + several * self.workers_sequence_s
        doubt = self.doubt if several or not self.workers_sequence_s else ""
        return replace(
            self, step_s=step_s, sequence_s=sequence_s, doubt=doubt, workers_step_s=0.0, workers_sequence_s=0.0
        )


LAST_PATCH = 99
"""Stands for the patch of a version that is given without one."""


def parse_release(version: str) -> tuple[int, int, int] | None:
    """Major, minor and patch number of a version such as ``0.25.1`` or ``0.32``; None for another text."""
    matched = re.fullmatch(r"(\d+)\.(\d+)(?:\.(\d+))?(?:\.\w+)*", version)
    return None if matched is None else (int(matched[1]), int(matched[2]), int(matched[3] or LAST_PATCH))


_SINCE = {"async_scheduling": (0, 14), "scheduler_reserve_full_isl": (0, 19)}
"""Versions of vLLM since which a setting that is on by default has been so."""


def version_defaults(version: str | None) -> dict[str, bool]:
    """Settings that are off by default in this version of vLLM, unlike here; {} for None and for other texts."""
    release = parse_release(version or "")
    return {} if release is None else {name: False for name, since in _SINCE.items() if release < since}


OFF = "off"
"""No API server is simulated."""
AUTO = "auto"
"""A run is simulated without the API server, and again with it where the first run would keep it busy."""
DEFAULT_CLASS = "datacenter"
"""The class of machine whose API server is simulated unless the user names one."""
ENGINE_ALONE: Mapping[str, Any] = {"api_server": OFF, "api_server_count": None, "front_end_ms": 0.0}
"""Settings of a simulated server with nothing between its clients and its engine."""
VIRTUAL_TIME = frozenset({"sim", "emulated"})
"""Names of the engines in virtual time, in which equal plans give equal runs."""


def is_server(engine: str) -> bool:
    """Whether the engine is a server that ebbench does not start: it is only measured, and policies are labels."""
    if ":" not in engine:
        return False
    from ebbench.config.server_url import is_server_url

    return is_server_url(engine)


@dataclass(frozen=True)
class EngineOptions:
    """Settings of the server, named as in vLLM."""

    max_num_seqs: int = declare(
        1024,
        "N, most sequences in a batch. Simulated: vLLM's default on its GPU.",
        ENGINE,
        at_least=1,
        shown="N = {:,} sequences",
    )
    max_num_batched_tokens: int = declare(
        8192,
        "B, token budget per step. Simulated: vLLM's default on its GPU.",
        ENGINE,
        at_least=1,
        shown="B = {:,} tokens per step",
    )
    max_num_active_seqs: int | None = declare(
        None, "Most sequences that run, where fewer than N.", ENGINE, at_least=1, shown="at most {:,} running"
    )
    max_num_queued_reqs: int | None = declare(
        None,
        "Open requests from which on further ones are refused (503).",
        ENGINE,
        at_least=1,
        shown="at most {:,} open requests",
    )
    max_num_queued_tokens: int | None = declare(
        None,
        "Queued prompt tokens from which on requests are refused.",
        ENGINE,
        at_least=1,
        shown="refuses from {:,} queued prompt tokens on",
    )
    scheduling_policy: Literal["fcfs", "priority"] = declare(
        "fcfs", "fcfs, or priority: requests of the lowest priority go first.", ENGINE, text=str,
        shown="schedules by {}",
    )  # fmt: skip
    long_prefill_token_threshold: int = declare(
        0, "Most tokens of one prompt per step; 0: no limit.", ENGINE, shown="{:,} tokens of one prompt per step"
    )
    long_prefill_token_threshold_adaptive: bool = declare(
        False,
        "Raise it to a request's share of B.",
        ENGINE,
        names=("--long-prefill-token-threshold-adaptive",),
        shown="adaptive",
    )
    scheduler_reserve_full_isl: bool = declare(
        True, "Admit a prompt as soon as its first chunk fits.", ENGINE,
        names=("--no-scheduler-reserve-full-isl/--scheduler-reserve-full-isl",), turns_off=True,
        shown="admits by the first chunk",
    )  # fmt: skip
    max_model_len: int = declare(
        40960, "Longest prompt plus output in tokens.", ENGINE, at_least=1, shown="at most {:,} tokens per request"
    )
    block_size: int = declare(16, "Tokens per KV block.", at_least=1, shown="KV blocks of {:,} tokens")
    num_kv_blocks: int | None = declare(
        None, "KV blocks of 16 tokens; default: the device's capacity.", ENGINE, at_least=1, shown="{:,} KV blocks"
    )
    gpu_memory_utilization: float | None = declare(
        None, "Share of the GPU's memory for vLLM; default: vLLM's own.", ENGINE, shown="{:.0%} of the GPU memory"
    )
    vllm_version: str | None = declare(
        None,
        f"Version whose defaults and KV cache a simulated server has. Default: {DEFAULT_VLLM}.",
        ENGINE,
        real="has those of the vLLM that runs",
        shown="defaults and KV cache of vLLM {}",
    )
    enable_prefix_caching: bool = declare(
        True,
        "Do not reuse KV of shared prefixes.",
        ENGINE,
        names=("--no-prefix-caching",),
        turns_off=True,
        shown="no prefix caching",
    )
    async_scheduling: bool = declare(
        True, "Schedule a step only when the previous one has ended.", ENGINE,
        names=("--no-async-scheduling/--async-scheduling",), turns_off=True, shown="no asynchronous scheduling",
    )  # fmt: skip
    enforce_eager: bool = declare(
        False,
        "Do not use CUDA graphs: the host launches every layer.",
        ENGINE,
        names=("--enforce-eager",),
        shown="no CUDA graphs",
    )
    quantization: str | None = declare(None, "Data type of the weights, if not the model's own: fp8.", ENGINE, shown="")
    kv_cache_dtype: str = declare(
        "auto", "Data type of the KV cache: auto (the model's own), bfloat16 or fp8.", ENGINE, shown=""
    )
    moe_backend: Literal["auto", "marlin"] = declare(
        "auto", "Kernels of experts: auto (the version's own choice) or marlin (experts in MXFP4).", ENGINE, text=str,
        shown="experts by {}'s kernels",
    )  # fmt: skip
    api_server: str = declare(
        AUTO, "vLLM's API server, simulated: auto (where it would be busy), datacenter, FILE.toml or off.", ENGINE,
        complete="api_servers_or_auto", shown="", real="answers through a real one", file=True)  # fmt: skip
    api_server_count: int | None = declare(
        None,
        "Its processes per engine; default: one per data-parallel unit.",
        ENGINE,
        at_least=1,
        at_most=1024,
        shown="",
        real="answers through a real one",
    )
    assume_kernels: bool = declare(
        False, "Estimate kernels that were not measured on the GPU by a roofline; results say so.", ENGINE,
        names=("--assume-kernels",), shown="kernels that were not measured assumed",
    )  # fmt: skip
    front_end_ms: float | None = declare(
        None, "Time per request in front of the engine, simulated; default: as servers with the GPU have it.", ENGINE,
        at_least=0, at_most=1e3 * MOST_SECONDS, shown="{:g} ms in front of the engine", real="has a real one",
    )  # fmt: skip
    speculative: str | None = declare(
        None,
        "Speculative decoding, simulated: key=value pairs of method, tokens and acceptance.",
        ENGINE,
        shown="",
        real="drafts as its server does (vLLM: -- --speculative-config)",
    )
    warmup: int = declare(
        0,
        "Requests before the start, of the plan's lengths; not recorded.",
        LOAD,
        names=("--warmup", "--num-warmups"),
        shown="{:,} warm-up requests",
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.api_server == AUTO and self.api_server_count is not None:
            object.__setattr__(self, "api_server", DEFAULT_CLASS)  # who states a number of processes wants to see them
        if self.speculative is None:
            return
        drafts = parse_speculative(self.speculative)
        # A run's settings hold the rates, not the file that they are read from.
        object.__setattr__(self, "speculative", drafts.text)
        if not drafts.rules.asynchronous:
            object.__setattr__(self, "async_scheduling", False)

    @property
    def drafts(self) -> Speculative | None:
        """How the server drafts tokens; None: not at all. Raises UsageError."""
        return None if self.speculative is None else parse_speculative(self.speculative)

    @property
    def by_priority(self) -> bool:
        """Whether the server schedules by the requests' priorities."""
        return self.scheduling_policy == "priority"

    @property
    def running_limit(self) -> int:
        """Requests that may run at a time."""
        return self.max_num_seqs if self.max_num_active_seqs is None else self.max_num_active_seqs


ONLY_SIMULATED = tuple(name for name, declared in declared_in(EngineOptions).items() if declared.real)
"""Settings of a simulated server that a real one has no place for: it has the thing itself."""
