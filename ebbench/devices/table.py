"""The kernel-table cost model: host + layers x (dense + attention) + head and sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ebbench.devices.base import StepShape
from ebbench.devices.collectives import GRAPH_TOKENS
from ebbench.devices.geometry import ModelGeometry
from ebbench.devices.kerneltables import source
from ebbench.devices.layers import MAX_SAMPLED, MAX_TOKENS, step_arrays
from ebbench.devices.parallel import SINGLE, Parallel
from ebbench.devices.profiles import DeviceProfile
from ebbench.devices.surfaces import AttentionTables, estimated_surfaces, has_joint_tables, not_measured, surfaces
from ebbench.spec.server import HostCosts

# Time to launch one layer's kernels from Python, without CUDA graphs and compilation: the minimum of the iteration
# times published for Qwen3-4B in eager mode (9.8 ms for 36 layers; eb-vllm, cost_model/linear_model).
EAGER_LAYER_S = 270e-6


@dataclass(frozen=True)
class TableCost:
    """Step time from precomputed tables; a pure function of the shape, a few microseconds per call.

    ``attention``: layers of each kind, with the tables of one.
    ``dense_s`` is indexed by tokens, ``head_s`` by sampled sequences. ``launch_s``: least time to launch a step's
    kernels (eager mode); 0 with CUDA graphs. ``overlap``: asynchronous scheduling; the host prepares the next step
    while the GPU works, so its time counts only if it is longer. ``experts_s``, by the tokens of all units: only for a
    unit of an engine whose units share experts.
    """

    dense_s: list[float]
    head_s: list[float]
    attention: tuple[tuple[int, AttentionTables], ...]
    host: HostCosts
    overlap: bool
    launch_s: float = 0.0
    experts_s: list[float] | None = None

    def step_s(self, shape: StepShape) -> float:
        """Time (s) from one step to the next: host and GPU one after the other, or overlapped."""
        prefill, seqs, _, _ = shape  # reading one field of a NamedTuple takes as long as unpacking all
        host = self.host.step_s + self.host.sequence_s * (seqs + len(prefill))
        gpu = self.gpu_s(shape)
        if self.experts_s is not None:
            gpu += self._experts_s(_tokens(shape))
        if gpu < self.launch_s:
            gpu = self.launch_s
        if self.overlap:
            return gpu if gpu > host else host
        return gpu + host

    def pass_s(self, shapes: Sequence[StepShape], units: int) -> float:
        """Time (s) of one pass of an engine of ``units`` units; ``shapes``: those of the units that have requests.

        Every unit waits for the one with the most attention and dense work, then computes its experts for the tokens of
        all units. Units without requests take part with one token. If every batch fits a CUDA graph, all are padded to
        the largest (vLLM, v1/worker/dp_utils.py).
        """
        tokens = [_tokens(shape) for shape in shapes]
        largest = max(tokens)
        together = sum(tokens) + units - len(tokens)
        if not self.launch_s and largest <= GRAPH_TOKENS:
            together = units * largest
        gpu = max(max(self.gpu_s(shape) for shape in shapes) + self._experts_s(together), self.launch_s)
        sequences = max(shape.decode_seqs + len(shape.prefill) for shape in shapes)
        host = self.host.step_s + self.host.sequence_s * sequences
        return max(gpu, host) if self.overlap else gpu + host

    def _experts_s(self, tokens: int) -> float:
        if self.experts_s is None:
            return 0.0
        if tokens <= MAX_TOKENS:
            return self.experts_s[tokens]
        return self.experts_s[MAX_TOKENS] * (tokens / MAX_TOKENS)

    def gpu_s(self, shape: StepShape) -> float:
        """Time (s) of GPU work only, without experts that several units share."""
        prefill, seqs, kv_tokens, sampled = shape
        tokens, single = seqs, False
        for chunk, _ in prefill:
            tokens += chunk
            if chunk == 1:
                single = True
        total = self.dense_s[tokens if tokens < MAX_TOKENS else MAX_TOKENS]
        total += self.head_s[sampled if sampled < MAX_SAMPLED else MAX_SAMPLED]
        for layers, tables in self.attention:
            time_s = tables.single_token_step_s if single else tables.step_s
            total += layers * time_s(prefill, seqs, kv_tokens)
        return total


def _tokens(shape: StepShape) -> int:
    return shape.decode_seqs + sum(chunk for chunk, _ in shape.prefill)


def table_cost(
    profile: DeviceProfile,
    model: ModelGeometry,
    host: HostCosts,
    *,
    shape: Parallel = SINGLE,
    overlap: bool = True,
    eager: bool = False,
) -> tuple[TableCost, str, tuple[str, ...]] | None:
    """Build the model of one unit with its provenance and warnings; None if the device has no kernel tables."""
    arrays = step_arrays(profile, model, shape, eager=eager)
    found = _attention(profile, model.sliced(shape.tp), host) if arrays is not None else None
    if arrays is None or found is None:
        return None
    attention, warnings = found
    cost = TableCost(
        dense_s=arrays.dense.tolist(),
        head_s=arrays.head.tolist(),
        attention=attention,
        host=host,
        overlap=overlap,
        launch_s=EAGER_LAYER_S * model.layers if eager else 0.0,
        experts_s=None if arrays.experts is None else arrays.experts.tolist(),
    )
    parts = [_provenance(profile, model, host), arrays.provenance, _eager(cost) if eager else ""]
    return cost, "; ".join(text for text in parts if text), (*arrays.warnings, *warnings)


def _attention(
    profile: DeviceProfile, part: ModelGeometry, host: HostCosts
) -> tuple[tuple[tuple[int, AttentionTables], ...], tuple[str, ...]] | None:
    """Every kind of layer with its tables, and warnings; None if the device has no attention tables."""
    found: list[tuple[int, AttentionTables]] = []
    warnings: list[str] = []
    for mixer in part.mixers:
        if not mixer.measured_alike:
            raw = estimated_surfaces(profile, mixer, part.kv_dtype_bytes)
            warnings.append(not_measured(mixer, part.layers, profile.name))
        elif (measured := surfaces(profile, mixer, part.kv_dtype)) is not None:
            raw = measured[0]
            warnings += measured[1]
        else:
            return None
        found.append((mixer.layers, raw.tables(host.mixed_excess, mixer.window)))
    return tuple(found), tuple(dict.fromkeys(warnings))


def _eager(cost: TableCost) -> str:
    return f"eager mode: a step's kernels take at least {cost.launch_s * 1e3:.1f} ms to launch"


def _types(model: ModelGeometry) -> str:
    """The types of the weights, those of the most bytes first."""
    return " and ".join(dict.fromkeys((model.dtype_of_experts, *model.weight_dtypes)))


def _provenance(profile: DeviceProfile, model: ModelGeometry, host: HostCosts) -> str:
    joint = has_joint_tables(profile.name)
    kinds = ("mixed", "layer") if profile.name == "rtx-4090" else ("gemm", "mixed" if joint else "decode")
    tables = "; ".join(dict.fromkeys(source(kind) for kind in kinds))
    mixed = "mixed attention measured" if joint else f"mixed attention: {profile.mixed_note}"
    types = "" if model.plain else f"; weights in {_types(model)}, KV cache in {model.kv_dtype}"
    return f"kernel tables: {tables}; {mixed}{types}; host constants: {host.source}"
