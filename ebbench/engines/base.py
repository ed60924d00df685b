"""The engine interface, from plan and policy to tables of requests, steps and decisions; checks before a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from ebbench.config.declare import declared_in, option_name
from ebbench.config.topology import TopologySpec
from ebbench.devices.base import Device
from ebbench.errors import UsageError
from ebbench.records.plan import Observer, Plan
from ebbench.records.warnings import RunWarning, warning
from ebbench.spec.server import ENGINE_ALONE, OFF, ONLY_SIMULATED, EngineOptions
from vllm_eb.policy import PolicySpec, least_seqs, least_tokens

if TYPE_CHECKING:
    from ebbench.simulation.step import StepParts


@dataclass(frozen=True)
class EngineResult:
    """Tables in the schemas of :mod:`ebbench.records.files`, and entries for the manifest.

    ``steps`` of an engine that was asked for figures only lacks columns that no figure needs.

    ``invalid``: reasons that make the run INVALID and that only the engine knows. ``facts`` are added to the plan's.
    ``server_metrics``: samples of the server's metrics page, if it has one. ``device``: the device of one instance, if
    that is a unit of several GPUs instead of the given single GPU. ``step_parts``: the steps of a long run in parts, to
    be stored one after the other; ``steps`` is then empty.
    """

    requests: pa.Table
    steps: pa.Table
    decisions: pa.Table
    warnings: tuple[RunWarning, ...] = ()
    interrupted: bool = False
    invalid: tuple[RunWarning, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    server_metrics: pa.Table | None = None
    device: Device | None = None
    step_parts: StepParts | None = None

    def uninterrupted(self) -> EngineResult:
        """This result, for callers that can do nothing with a part. Raises KeyboardInterrupt if it is one."""
        if self.interrupted:
            raise KeyboardInterrupt
        return self

    @property
    def last_mode(self) -> str:
        """The mode of the last step, eb or mb; "" if no modes are known."""
        if self.step_parts is not None:
            return self.step_parts.last_mode
        known = self.steps.num_rows and "mode" in self.steps.column_names
        return str(self.steps["mode"][-1].as_py()) if known else ""


class Engine(Protocol):
    """Runs a plan under a policy."""

    @property
    def name(self) -> str:
        """The engine's name on the command line."""
        ...

    def run(
        self, plan: Plan, policy: PolicySpec, device: Device, options: EngineOptions, observer: Observer | None
    ) -> EngineResult:
        """Run to the end of the plan. Raises RunError if that fails."""
        ...


def check_counts(**counts: int | float | None) -> None:
    """Raise UsageError for a count or factor that must be positive and is not; None and an infinite rate are valid."""
    for name, value in counts.items():
        if name == "request_rate" and value == inf:
            continue
        if value is not None and not 0 < value < inf:
            option = "--" + name.replace("_", "-")
            least = "at least 1" if isinstance(value, int) else "more than 0" if value != inf else "a finite number"
            raise UsageError(f"{option} must be {least}, not {value}")


def check_tp(tp: int, link: str | None) -> None:
    """Raise UsageError for a number of GPUs below 1, and for a link of a single GPU."""
    check_counts(tp=tp)
    if link is not None and tp == 1:
        raise UsageError(f"--link {link} joins the GPUs of one server: give --tp too, for example --tp 2")


_MOST_WARMUP = 1_000_000


def check_options(options: EngineOptions, policies: Sequence[PolicySpec]) -> None:
    """Raise UsageError for scheduler settings that vLLM refuses too, or that a policy does not support."""
    _check_vllm_limits(options)
    check_front_end(vars(options))
    if not 0 <= options.warmup <= _MOST_WARMUP:
        raise UsageError(f"--warmup must be 0 or more requests, at most {_MOST_WARMUP:,}, not {options.warmup}")
    if options.max_num_batched_tokens < options.max_num_seqs:
        raise UsageError(
            f"--max-num-batched-tokens {options.max_num_batched_tokens} is below --max-num-seqs "
            f"{options.max_num_seqs}, which vLLM refuses; raise it to {options.max_num_seqs} or more, or lower "
            "--max-num-seqs"
        )
    if options.by_priority:
        for spec in policies:
            refuse_two_orders(spec.name, spec.orders_queue)
    limit = "--max-num-seqs" if options.max_num_active_seqs is None else "--max-num-active-seqs"
    for spec in policies:
        if least_seqs(spec) > options.running_limit:
            raise UsageError(
                f"policy {spec.name}: k exceeds {limit} {options.running_limit}, so it would wait for more "
                f"idle slots than there are; use k={options.running_limit} or less"
            )
        if least_tokens(spec) > options.max_num_batched_tokens:
            raise UsageError(
                f"policy {spec.name}: its budget exceeds --max-num-batched-tokens {options.max_num_batched_tokens}, "
                f"which bounds every step; raise that to {least_tokens(spec)} or more"
            )


def check_front_end(given: Mapping[str, Any]) -> None:
    """Raise UsageError for ``given`` settings of what is in front of an engine whose costs are not known."""
    own = {name: given[name] for name in ENGINE_ALONE if given.get(name) is not None}
    if any(value != getattr(EngineOptions, name) for name, value in own.items()):
        from ebbench.simulation.front_end import front_end_costs

        front_end_costs(EngineOptions(**own))


def refuse_two_orders(policy: str, orders_queue: bool) -> None:
    """Raise UsageError for a policy that orders waiting requests itself, where the server does by priority."""
    if orders_queue:
        raise UsageError(
            f"policy {policy} orders waiting requests by its own rule, and --scheduling-policy priority by their "
            "priority: leave one of them out (ttft= or order= of the policy)"
        )


def _check_vllm_limits(options: EngineOptions) -> None:
    """Raise UsageError for limits that contradict each other; vLLM refuses them too, or ignores them."""
    active, threshold = options.max_num_active_seqs, options.long_prefill_token_threshold
    if active is not None and active > options.max_num_seqs:
        raise UsageError(
            f"--max-num-active-seqs {active} is above --max-num-seqs {options.max_num_seqs}, which vLLM refuses; give "
            f"{options.max_num_seqs} or less"
        )
    if not 0 <= threshold <= options.max_model_len:
        raise UsageError(
            f"--long-prefill-token-threshold must be between 0 (off) and --max-model-len {options.max_model_len}, not "
            f"{threshold}"
        )
    if options.drafts is not None and 0 < threshold <= options.drafts.tokens:
        raise UsageError(
            f"--long-prefill-token-threshold {threshold} is less than a decode with {options.drafts.tokens} drafted "
            f"tokens computes, at which vLLM fails; give {options.drafts.tokens + 1} or more"
        )
    if options.long_prefill_token_threshold_adaptive and not threshold:
        raise UsageError(
            "--long-prefill-token-threshold-adaptive has no effect without a threshold; give "
            "--long-prefill-token-threshold too, for example 2048"
        )


def refuse_queue_limits(options: EngineOptions, topology: str) -> None:
    """Raise UsageError where queue limits are set for several instances: vLLM counts per API server, and behind a
    dispatcher their number and the way on are not known."""
    if options.max_num_queued_reqs is not None or options.max_num_queued_tokens is not None:
        raise UsageError(
            f"--max-num-queued-reqs and --max-num-queued-tokens are simulated for one instance, not for {topology}; "
            "leave them out, or leave out --topology"
        )


def refuse_undecided(topology: TopologySpec | None, policies: Sequence[PolicySpec]) -> None:
    """Raise UsageError for a policy that would have nothing to decide."""
    for policy in policies:
        if topology is not None and topology.disaggregated and not policy.native:
            raise UsageError(
                f"topology {topology.label} separates prefill from decode, so there is nothing for policy "
                f"{policy.name} to decide; use --policy v1"
            )


def refuse_simulated(given: Mapping[str, Any], engine: str) -> None:
    """Raise UsageError where ``given`` settings simulate a part of a server that ``engine`` has in fact."""
    for name, declared in declared_in(EngineOptions).items():
        value = given.get(name)
        if declared.real and value not in (None, declared.default, OFF):
            shown = f"{value:g}" if isinstance(value, float) else value
            raise UsageError(
                f"{option_name(name)} {shown} is simulated by engines sim and emulated; engine {engine} "
                f"{declared.real}: leave it out"
            )


def refuse_server_settings(server: str, names: Sequence[str], remedy: str = "leave it out here") -> None:
    """Raise UsageError if settings are given for a server that already runs, where they would change nothing.

    ``names``: those that were given, as the user writes them.
    """
    if names:
        raise UsageError(
            f"{names[0]} is set where a server is started, and {server} runs already: start it with that, and {remedy}"
        )


_OF_REQUESTS = frozenset({"warmup", "max_model_len", *ONLY_SIMULATED})
"""Options that the load generator uses too, and those that :func:`refuse_simulated` refuses."""
_STATED = ("max_num_seqs", "max_num_batched_tokens")
"""Settings that are taken for a running server too, and said to change nothing."""


def changed_settings(options: EngineOptions) -> list[str]:
    """The settings of a server among ``options`` that differ from their defaults, as options of the command line."""
    return [
        option_name(option.name)
        for option in fields(EngineOptions)
        if option.name not in (*_OF_REQUESTS, *_STATED) and getattr(options, option.name) != option.default
    ]


def stated_limits(options: EngineOptions) -> list[RunWarning]:
    """A warning if B or N were given for a server that already runs with its own."""
    given = {name: getattr(options, name) for name in _STATED}
    given = {name: value for name, value in given.items() if value != getattr(EngineOptions, name)}
    return [warning("stated-limits", given=given)] if given else []


IMAGES_AS_TOKENS = warning("images-as-tokens")


def refuse_unsimulated(plan: Plan, engine: str, options: EngineOptions) -> None:
    """Raise UsageError for LoRA adapters, which no simulated engine has, and for priorities that the server refuses."""
    refuse_priorities(uses_priorities(plan), options)
    if _uses(plan, "lora"):
        raise UsageError(
            f"--lora-assignment chooses adapters of a server; engine {engine} simulates none: leave it out, or give "
            "--engine URL (or vllm, with -- --enable-lora --lora-modules NAME=PATH)"
        )


def refuse_priorities(given: bool, options: EngineOptions) -> None:
    """Raise UsageError for priorities where the server does not schedule by them: they would change nothing."""
    if given and not options.by_priority:
        raise UsageError(
            "classes have priorities, and the server does not schedule by them: add --scheduling-policy priority, or "
            "leave the priorities out"
        )


def uses_priorities(plan: Plan) -> bool:
    """Whether requests of the plan carry priorities."""
    return _uses(plan, "priority")


def plan_notes(plan: Plan) -> tuple[RunWarning, ...]:
    """Warnings about what of a plan is not simulated."""
    return (IMAGES_AS_TOKENS,) if _uses(plan, "image_tokens") else ()


def _uses(plan: Plan, column: str) -> bool:
    """Whether a request of the plan has a value in an optional column."""
    return column in plan.table.column_names and plan.table[column].null_count < len(plan)


def start_notes(device: Device, options: EngineOptions) -> tuple[RunWarning, ...]:
    """Warnings where vLLM would refuse to start with these options, though the plan's requests fit."""
    return (*_beyond_positions(device, options), *_beyond_capacity(device, options))


def rank_notes(policy: PolicySpec, ranks: int) -> tuple[RunWarning, ...]:
    """What an instance of ``ranks`` data-parallel ranks needs at its start so that they refill together."""
    if ranks == 1 or not policy.aligns_ranks:
        return ()
    from vllm_eb.strategy import LONGEST_PERIOD

    return (warning("count-passes", ranks=ranks, interval=LONGEST_PERIOD),)


def _positions(device: Device) -> int:
    """Longest sequence of the model in tokens; 0 if it is not known."""
    return device.geometry.positions if device.geometry is not None else 0


def _default_limit(device: Device, options: EngineOptions) -> int:
    """The model's positions where no ``--max-model-len`` was given, as vLLM then takes them; else 0."""
    return _positions(device) if options.max_model_len == EngineOptions.max_model_len else 0


def _beyond_positions(device: Device, options: EngineOptions) -> tuple[RunWarning, ...]:
    limit = _positions(device)
    if not limit or _default_limit(device, options) or options.max_model_len <= limit:
        return ()
    return (warning("beyond-positions", max_model_len=options.max_model_len, positions=limit, model=device.model),)


def _beyond_capacity(device: Device, options: EngineOptions) -> tuple[RunWarning, ...]:
    """With a given number of blocks the device is not the limit."""
    if device.geometry is None or options.num_kv_blocks is not None:
        return ()
    capacity = longest_sequence(device, options)
    if capacity >= options.max_model_len:
        return ()
    named = {"model": device.model, "device": device.name, "capacity_tokens": capacity}
    return (warning("beyond-capacity", max_model_len=options.max_model_len, **named),)


def num_kv_blocks(device: Device, options: EngineOptions) -> int:
    """Number of KV blocks of an instance: as given, or from the device's capacity.

    Raises UsageError for more than the GPU's memory of a pool whose blocks are not of 16 tokens of every layer.
    """
    layout = device.kv_layout
    if options.num_kv_blocks:
        if layout is not None and device.profile is not None:
            _check_pool(options.num_kv_blocks * layout.block_bytes, device.profile.memory_bytes, device.model, options)
        return options.num_kv_blocks
    return (
        device.kv_capacity_tokens // options.block_size
        if layout is None
        else layout.blocks_of(device.kv_capacity_tokens)
    )


def _check_pool(pool_bytes: int, memory_bytes: int, model: str, options: EngineOptions) -> None:
    if pool_bytes > memory_bytes:
        raise UsageError(
            f"--num-kv-blocks {options.num_kv_blocks} would take {pool_bytes / 1e9:,.0f} GB of "
            f"{memory_bytes / 1e9:,.0f}: layers of {model} keep a window or a state, so its "
            "blocks are not of 16 tokens; give the number of blocks in its pool, as `ebbench devices show` prints it"
        )


def longest_sequence(device: Device, options: EngineOptions) -> int:
    """Tokens of the longest sequence that an instance's KV blocks hold, as far as ``max_model_len`` allows it."""
    blocks, layout = num_kv_blocks(device, options), device.kv_layout
    if layout is None:
        return blocks * options.block_size
    return layout.longest_within(blocks, options.max_model_len)


def check_fits(plan: Plan, device: Device, options: EngineOptions) -> None:
    """Raise UsageError for an empty plan, and for a request that does not fit on an instance (the message names the
    longest one).

    ``device``: that of one instance. If its KV capacity is unknown (0: hardware without a profile, where only vLLM
    knows it), only ``max_model_len`` is checked.
    """
    if not len(plan):
        raise UsageError("the plan holds no request; raise --num-prompts or choose another workload")
    total = pc.add(plan.table["input_tokens"].cast(pa.int64()), plan.table["output_tokens"])
    longest = int(pc.max(total).as_py())
    request = plan.table["request_id"][int(pc.index(total, longest).as_py())].as_py()
    if longest > options.max_model_len:
        raise UsageError(
            f"request {request} has {longest:,} tokens, more than --max-model-len {options.max_model_len}; raise it or "
            "pass --drop-too-long"
        )
    limit = _default_limit(device, options)
    if limit and longest > limit:
        raise UsageError(
            f"request {request} has {longest:,} tokens, more than the {limit:,} positions of {device.model}, which "
            f"are vLLM's limit by default; pass --drop-too-long with --max-model-len {limit}, or a larger "
            "--max-model-len if the server stretches them"
        )
    if options.num_kv_blocks is None and not device.kv_capacity_tokens:
        return
    capacity = longest_sequence(device, options)
    if longest <= capacity:
        return
    where = "--num-kv-blocks" if options.num_kv_blocks is not None else f"{device.model} on {device.name}"
    remedy = f"drop longer ones with --max-model-len {capacity} --drop-too-long" if capacity else "give it more memory"
    raise UsageError(
        f"request {request} needs {longest:,} KV tokens but {where} holds {capacity:,}, so it cannot run; {remedy}"
    )
