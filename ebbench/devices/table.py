"""The kernel-table cost model: host + layers x (dense + attention) + head and sampler."""

from __future__ import annotations

from dataclasses import dataclass

from ebbench.devices.attention import AttentionTables
from ebbench.devices.base import StepShape
from ebbench.devices.geometry import ModelGeometry
from ebbench.devices.kerneltables import source
from ebbench.devices.layers import MAX_SAMPLED, MAX_TOKENS, step_arrays
from ebbench.devices.profiles import DeviceProfile, HostCosts
from ebbench.devices.surfaces import has_joint_tables, surfaces

# Launching one layer's kernels from Python, without CUDA graphs and compilation: the floor of the iteration times
# published for Qwen3-4B in eager mode (9.8 ms for 36 layers; eb-vllm, cost_model/linear_model).
EAGER_LAYER_S = 270e-6


@dataclass(frozen=True)
class TableCost:
    """Step time from precomputed tables; a pure function of the shape, a few microseconds a call.

    ``dense_s`` is indexed by tokens, ``head_s`` by sampled sequences. ``launch_s`` is the least time a step needs
    for launching its kernels (eager mode); 0 under CUDA graphs. ``overlap`` is asynchronous scheduling: the host
    prepares the next step while the GPU works, so its time shows only where it is the longer of the two.
    """

    dense_s: list[float]
    head_s: list[float]
    full_layers: int
    full: AttentionTables
    sliding_layers: int
    sliding: AttentionTables | None
    host: HostCosts
    overlap: bool
    launch_s: float = 0.0

    def step_s(self, shape: StepShape) -> float:
        """Seconds from one step to the next: host and GPU one after the other, or overlapped."""
        host = self.host.step_s + self.host.sequence_s * (shape.decode_seqs + len(shape.prefill))
        gpu = self.gpu_s(shape)
        if gpu < self.launch_s:
            gpu = self.launch_s
        if self.overlap:
            return gpu if gpu > host else host
        return gpu + host

    def gpu_s(self, shape: StepShape) -> float:
        """Seconds of GPU work alone."""
        prefill, seqs = shape.prefill, shape.decode_seqs
        tokens = seqs
        for chunk, _ in prefill:
            tokens += chunk
        sampled = shape.sampled_seqs
        total = self.dense_s[tokens if tokens < MAX_TOKENS else MAX_TOKENS]
        total += self.head_s[sampled if sampled < MAX_SAMPLED else MAX_SAMPLED]
        total += self.full_layers * self.full.step_s(prefill, seqs, shape.decode_kv_tokens)
        if self.sliding is not None:
            total += self.sliding_layers * self.sliding.step_s(prefill, seqs, shape.decode_kv_tokens)
        return total


def table_cost(
    profile: DeviceProfile, model: ModelGeometry, host: HostCosts, *, overlap: bool = True, eager: bool = False
) -> tuple[TableCost, str, tuple[str, ...]] | None:
    """Build the model, its provenance and warnings; None where the device has no kernel tables."""
    arrays = step_arrays(profile, model)
    raw = surfaces(profile, model)
    if arrays is None or raw is None:
        return None
    dense, head, warnings = arrays
    cost = TableCost(
        dense_s=dense.tolist(),
        head_s=head.tolist(),
        full_layers=model.layers - model.sliding_layers,
        full=raw.tables(host.mixed_excess),
        sliding_layers=model.sliding_layers,
        sliding=raw.tables(host.mixed_excess, model.sliding_window) if model.sliding_layers else None,
        host=host,
        overlap=overlap,
        launch_s=EAGER_LAYER_S * model.layers if eager else 0.0,
    )
    return cost, _provenance(profile, host) + (f"; {_eager(cost)}" if eager else ""), warnings


def _eager(cost: TableCost) -> str:
    return f"eager mode: a step's kernels take at least {cost.launch_s * 1e3:.1f} ms to launch"


def _provenance(profile: DeviceProfile, host: HostCosts) -> str:
    joint = has_joint_tables(profile.name)
    kinds = ("mixed", "layer") if profile.name == "rtx-4090" else ("gemm", "mixed" if joint else "decode")
    tables = "; ".join(dict.fromkeys(source(kind) for kind in kinds))
    mixed = "mixed attention measured" if joint else f"mixed attention: {profile.mixed_note}"
    return f"kernel tables: {tables}; {mixed}; host constants: {host.source}"
