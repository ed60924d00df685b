"""Topologies: number and kind of engine instances, and how they are connected.

Written as a short form (``dp=4`` or ``replicas=4``, ``dp=4,lockstep=on``, ``2p2d``, ``tp=4,dp=8,ep=32``,
``3p1d,tp=4,dp=8,ep=32``) or as a table ``[topology]``::

    [topology]
    network_ms = 0.5            # one way between dispatcher and instance
    link = "pcie"               # between the GPUs of a server; `ebbench devices show` lists those of a device
    replicas = { instances = 4 }      # data-parallel replicas; or a prefill and a decode pool:
    prefill = { instances = 3, tp = 4, dp = 8, ep = 32 }
    decode = { instances = 1, dp = 32, ep = 32, gpu_memory_utilization = 0.7 }
    transfer = { bandwidth_gb_per_s = 45, backpressure = true }
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from ebbench.config.declare import MOST_SECONDS, Setting, named_settings, split_pairs
from ebbench.errors import UsageError
from vllm_eb.settings import MOST_COUNT

PIPELINE = (
    "pipeline parallelism is not modelled: there is no measured run with several stages to validate the gaps between "
    "stages and the transfer of activations; use tp (inside a server) or dp"
)
EXAMPLES = "dp=4, 1p3d, 2p2d, 3p1d or tp=4,dp=8,ep=32"

DEFAULT_DISPATCH = "least-outstanding"
"""How requests are spread over the instances, unless asked otherwise."""

# vLLM's example of P2P NCCL transfer uses 0.9 of the GPU's memory on prefill servers and 0.7 on decode servers; the
# rest receives KV (vLLM's docs/design/p2p_nccl_connector.md).
PREFILL_UTILIZATION, DECODE_UTILIZATION = 0.9, 0.7

MOST_UNITS = 10_000
"""Most data-parallel units of a pool, each of which is simulated with a scheduler of its own."""

_SIZES = {
    "instances": Setting("equal instances", at_least=1, kind=int, example=4),
    "tp": Setting("GPUs of a unit", at_least=1, kind=int, example=4),
    "dp": Setting("units of an instance with ep or lockstep; without, replicas", at_least=1, kind=int, example=4),
    "ep": Setting("GPUs that share the experts: tp x dp", at_least=1, kind=int, example=32),
    "lockstep": Setting("dp units of a dense model make their steps together", kind=bool, example="on"),
}
_POOLS = re.compile(r"^(\d+)p(\d+)d$", re.IGNORECASE)


class PoolSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Equal instances. An instance has ``dp`` units of ``tp`` GPUs.

    With ``dp`` above 1 its units share expert layers (``ep``) and therefore wait for each other in every step.
    ``lockstep``: they share nothing and wait for each other all the same, as the data-parallel ranks of a dense model
    do up to vLLM 0.13, which agree on every forward pass (``DPMetadata.make``).
    ``max_num_seqs`` and ``max_num_batched_tokens`` override the run's, per unit.
    """

    instances: int = 1
    tp: int = 1
    dp: int = 1
    ep: int = 1
    lockstep: bool = False
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float | None = None

    def __post_init__(self) -> None:
        for key in ("instances", "tp", "dp", "ep", "max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"{key} must be at least 1, not {value}")
        if self.instances * self.dp > MOST_UNITS:
            raise ValueError(f"at most {MOST_UNITS:,} units are simulated, not {self.instances * self.dp:,}")
        if self.ep not in (1, self.tp * self.dp):
            raise ValueError(f"ep must be tp x dp = {self.tp * self.dp} (or left out), not {self.ep}")
        if self.lockstep and (self.dp == 1 or self.ep > 1):
            raise ValueError("lockstep is for dp >= 2 units without ep; units that share experts wait anyway")
        if self.dp > 1 and self.ep == 1 and not self.lockstep:
            raise ValueError(
                "dp units of one instance share its experts: set ep = tp x dp, or use instances for replicas"
            )
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must lie in (0, 1], not {self.gpu_memory_utilization:g}")

    @property
    def units(self) -> int:
        """DP units of all instances."""
        return self.instances * self.dp

    @property
    def gpus(self) -> int:
        """GPUs of all instances."""
        return self.units * self.tp


SLOWEST_GB_PER_S = 1e-6
"""Slowest link between instances; a transfer over a slower one would outlast the nanoseconds of a simulation."""


def _check_ms(key: str, value: float) -> None:
    if not 0 <= value <= 1e3 * MOST_SECONDS:
        raise ValueError(f"{key} must be at least 0 and at most {1e3 * MOST_SECONDS:g}, not {value:g}")


class TransferSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """KV transfer from prefill to decode instances. Defaults are those of vLLM's P2P NCCL connector.

    ``bandwidth_gb_per_s``: one way, per instance; None: the GPU's interconnect. ``store_gb``: memory of a decode unit
    for received KV; None: what ``gpu_memory_utilization`` leaves of its GPUs. ``held_until``: the received copy is
    freed when the request has finished (vLLM) or when its KV is in the cache (``admission``). Without ``backpressure``
    a full store is an out-of-memory failure; with it, transfers wait and the blocks on the prefill side stay allocated.
    ``first_token``: the side that sends the first token. ``save_ms_per_layer``: time that the connector adds to a
    prefill step per prompt and layer to copy its KV. The default fits the prefill pools of table 20 of the EB paper on
    H200; on RTX PRO 6000 0.20 to 0.25 would. That this copy is the cause is a hypothesis.
    ``kv_bytes_per_token``: for models of unknown geometry.
    """

    bandwidth_gb_per_s: float | None = None
    latency_ms: float = 1.0
    store_gb: float | None = None
    held_until: Literal["finish", "admission"] = "finish"
    backpressure: bool = False
    first_token: Literal["decode", "prefill"] = "decode"
    save_ms_per_layer: float = 0.12
    kv_bytes_per_token: int | None = None

    def __post_init__(self) -> None:
        for key in ("bandwidth_gb_per_s", "store_gb", "kv_bytes_per_token"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise ValueError(f"{key} must be positive, not {value:g}")
        if self.bandwidth_gb_per_s is not None and self.bandwidth_gb_per_s < SLOWEST_GB_PER_S:
            raise ValueError(
                f"bandwidth_gb_per_s must be at least {SLOWEST_GB_PER_S:g}, not {self.bandwidth_gb_per_s:g}"
            )
        if (self.kv_bytes_per_token or 0) > MOST_COUNT:
            raise ValueError(f"kv_bytes_per_token must be at most {MOST_COUNT:,}, not {self.kv_bytes_per_token:,}")
        for key in ("latency_ms", "save_ms_per_layer"):
            _check_ms(key, getattr(self, key))


class TopologySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Either ``replicas``, or ``prefill`` and ``decode``. ``network_ms``: one way from dispatcher to instance.

    ``link``: kind of link between the GPUs of a server, a name in the device's profile; "" is its default link.
    """

    name: str = ""
    replicas: PoolSpec | None = None
    prefill: PoolSpec | None = None
    decode: PoolSpec | None = None
    transfer: TransferSpec = msgspec.field(default_factory=TransferSpec)
    network_ms: float = 0.0
    link: str = ""

    def __post_init__(self) -> None:
        if (self.prefill is None) != (self.decode is None):
            raise ValueError("a topology with pools needs both prefill and decode")
        if (self.replicas is None) == (self.prefill is None):
            raise ValueError("a topology has either replicas, or prefill and decode")
        _check_ms("network_ms", self.network_ms)

    @property
    def disaggregated(self) -> bool:
        """Whether prefill and decode run on different instances."""
        return self.prefill is not None

    @property
    def pools(self) -> tuple[PoolSpec, ...]:
        """The pools; the pool that requests reach first comes first."""
        return tuple(pool for pool in (self.replicas, self.prefill, self.decode) if pool is not None)

    @property
    def gpus(self) -> int:
        """Number of GPUs in total."""
        return sum(pool.gpus for pool in self.pools)

    @property
    def label(self) -> str:
        """The name, or the short form."""
        return self.name or _short(self)


class _File(msgspec.Struct, frozen=True):
    topology: TopologySpec


def parse_topology(text: str) -> TopologySpec:
    """Parse a short form, or the ``[topology]`` table of a TOML file. Raises UsageError that says what to write."""
    if text.endswith(".toml"):
        from ebbench.foreign.documents import load_toml

        return load_toml(Path(text), _File).topology
    parts = split_pairs(text)
    if not parts:
        raise UsageError(f"the topology is empty; write for example {EXAMPLES}")
    pools = _POOLS.match(parts[0])
    sizes = _sizes(text, parts[1:] if pools else parts)
    try:
        if pools:
            if "instances" in sizes:
                raise ValueError(f"{parts[0]} already gives the number of instances")
            shape = {key: sizes[key] for key in ("tp", "dp", "ep", "lockstep") if key in sizes}
            return TopologySpec(
                prefill=PoolSpec(instances=int(pools[1]), **shape), decode=PoolSpec(instances=int(pools[2]), **shape)
            )
        return TopologySpec(replicas=_replicas(sizes))
    except ValueError as error:
        raise UsageError(f"topology {text!r}: {error}") from None


def _replicas(sizes: dict[str, Any]) -> PoolSpec:
    """A pool of replicas: data parallelism without shared experts means replicas."""
    if "ep" in sizes or sizes.get("lockstep"):
        return PoolSpec(**sizes)
    instances = sizes.get("instances", 1) * sizes.get("dp", 1)
    return PoolSpec(instances=instances, tp=sizes.get("tp", 1))


def _sizes(text: str, parts: list[str]) -> dict[str, Any]:
    for part in parts:
        key, equals, _ = part.partition("=")
        if key in ("pp", "pipeline"):
            raise UsageError(PIPELINE)
        if not equals:
            raise UsageError(f"unknown topology {text!r}; write for example {EXAMPLES}, or name a TOML file")
    return named_settings(",".join(parts), _SIZES, f"topology {text!r}", aliases={"replicas": "instances"})


def _short(spec: TopologySpec) -> str:
    if spec.prefill is not None and spec.decode is not None:
        before, after = (_shape(pool) for pool in (spec.prefill, spec.decode))
        pools = f"{spec.prefill.instances}p{spec.decode.instances}d"
        if before == after:
            return f"{pools},{before}" if before else pools
        return f"{pools}, prefill {before or 'tp=1'}, decode {after or 'tp=1'}"
    pool = spec.replicas or PoolSpec()
    if pool.dp > 1 or pool.ep > 1:
        return (f"instances={pool.instances}," if pool.instances > 1 else "") + _shape(pool)
    return f"dp={pool.instances}" + (f",tp={pool.tp}" if pool.tp > 1 else "")


def _shape(pool: PoolSpec) -> str:
    sizes = [f"{key}={getattr(pool, key)}" for key in ("tp", "dp", "ep") if getattr(pool, key) > 1]
    return ",".join([*sizes, "lockstep=on"] if pool.lockstep else sizes)
