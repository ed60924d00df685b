"""The kernel-table cost model: host + layers x (dense + attention) + head and sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ebbench.devices import library
from ebbench.devices.base import SINGLE, Drafter, Parallel, StepShape
from ebbench.devices.geometry import ModelGeometry
from ebbench.devices.kerneltables import select, source
from ebbench.devices.layers import GRAPH_TOKENS, MAX_SAMPLED, MAX_TOKENS, step_arrays
from ebbench.devices.profiles import DeviceProfile, list_devices
from ebbench.devices.roofline import BANDWIDTH_SHARE
from ebbench.devices.surfaces import (
    KINDS_IN_WORDS,
    AttentionTables,
    estimated_surfaces,
    has_joint_tables,
    library_surfaces,
    not_measured,
    surfaces,
)
from ebbench.records.warnings import RunWarning
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
    unit of an engine whose units share experts. ``drafter``: of a server with speculative decoding.
    """

    dense_s: list[float]
    head_s: list[float]
    attention: tuple[tuple[int, AttentionTables], ...]
    host: HostCosts
    overlap: bool
    launch_s: float = 0.0
    experts_s: list[float] | None = None
    drafter: Drafter | None = None

    def step_s(self, shape: StepShape) -> float:
        """Time (s) from one step to the next: host and GPU one after the other, or overlapped."""
        prefill, seqs, _, _, _, _ = shape  # reading one field of a NamedTuple takes as long as unpacking all
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
        prefill, seqs, kv_tokens, sampled, drafts, _ = shape
        tokens, single = seqs + drafts, False
        for chunk, _ in prefill:
            tokens += chunk
            if chunk == 1:
                single = True
        dense = self.dense_s[tokens if tokens < MAX_TOKENS else MAX_TOKENS]
        total = dense + self.head_s[sampled + drafts if sampled + drafts < MAX_SAMPLED else MAX_SAMPLED]
        if drafts and not prefill:
            for layers, tables in self.attention:
                total += layers * (tables.verify_s(seqs, kv_tokens) + tables.draft_state_s * drafts)
        else:
            for layers, tables in self.attention:
                time_s = tables.single_token_step_s if single else tables.step_s
                total += layers * time_s(prefill, seqs, kv_tokens)
                if drafts:
                    total += layers * tables.draft_state_s * drafts
        return total if self.drafter is None else total + self._drafting_s(self.drafter, shape, dense)

    def _drafting_s(self, drafter: Drafter, shape: StepShape, dense_s: float) -> float:
        """Time (s) of drafting the tokens of the next step, one after the other."""
        prefill, seqs, kv_tokens, _, drafts, wanted = shape
        rows = min(seqs + len(prefill), MAX_SAMPLED)
        _, tables = self.attention[drafter.kind]
        head = drafter.head_share * self.head_s[rows]
        first = tables.step_s(prefill, seqs, kv_tokens) if prefill or not drafts else tables.verify_s(seqs, kv_tokens)
        further = tables.decode.at2(seqs, kv_tokens / seqs) if seqs else 0.0
        layer = drafter.layer_share * self.dense_s[rows] + drafter.layers * further + head
        passes = drafter.passes if wanted is None else wanted  # the first also runs for the drafter's own KV
        drafting = head + (passes - 1) * layer if passes else 0.0
        return drafter.layer_share * dense_s + drafter.layers * first + drafting


def _tokens(shape: StepShape) -> int:
    return shape.decode_seqs + shape.draft_tokens + sum(chunk for chunk, _ in shape.prefill)


def measured_devices() -> tuple[str, ...]:
    """Names of the bundled devices with measured kernels: in the packaged tables, or in the library if installed."""
    packaged = {name for kind in ("decode", "mixed") for name in select(kind)["device"].unique().to_pylist()}
    of_library = library.SYSTEMS.keys() if library.installed() else ()
    return tuple(name for name in list_devices() if name in packaged or name in of_library)


class TableBuilt(NamedTuple):
    """A cost model with its provenance and its warnings. ``library``: its name if kernels come from it, else empty."""

    cost: TableCost
    provenance: str
    warnings: tuple[RunWarning, ...]
    library: str


def table_cost(
    profile: DeviceProfile,
    model: ModelGeometry,
    host: HostCosts,
    *,
    shape: Parallel = SINGLE,
    overlap: bool = True,
    eager: bool = False,
) -> TableBuilt | None:
    """Build the model of one unit; None if the device has no kernel tables."""
    mixing = _mixing(profile, model, shape, host)
    arrays = None if mixing is None else step_arrays(profile, model, shape, eager=eager, whole=mixing.whole)
    if arrays is None or mixing is None:
        return None
    cost = TableCost(
        dense_s=arrays.dense.tolist(),
        head_s=arrays.head.tolist(),
        attention=mixing.layers,
        host=host,
        overlap=overlap,
        launch_s=EAGER_LAYER_S * model.layers if eager else 0.0,
        experts_s=None if arrays.experts is None else arrays.experts.tolist(),
    )
    notes = (*arrays.notes, *mixing.notes)
    parts = (
        _provenance(profile, model, host), arrays.provenance, library.source(notes),
        f"eager mode: a step's kernels take at least {cost.launch_s * 1e3:.1f} ms to launch" if eager else "",
    )  # fmt: skip
    warnings = (*arrays.warnings, *mixing.warnings, *library.warnings(notes, profile.name))
    return TableBuilt(
        cost,
        "; ".join(text for text in parts if text),
        tuple(dict.fromkeys(warnings)),
        library.LABEL if notes else "",
    )


class _Mixing(NamedTuple):
    """Layers of each kind with the tables of one. ``whole``: kinds of layers that were measured with their projections,
    or as a part of such; ``notes``: what the library gave."""

    layers: tuple[tuple[int, AttentionTables], ...]
    whole: frozenset[str]
    warnings: tuple[RunWarning, ...]
    notes: tuple[library.Note, ...]


def _mixing(profile: DeviceProfile, model: ModelGeometry, shape: Parallel, host: HostCosts) -> _Mixing | None:
    """Every kind of layer; None if the device has no attention tables."""
    part = model.sliced(shape.tp)
    layers: list[tuple[int, AttentionTables]] = []
    warnings: list[RunWarning] = []
    notes: list[library.Note] = []
    whole: set[str] = set()
    kinds = sorted(zip(model.mixers, part.mixers, strict=True), key=lambda pair: pair[1].kind == "index")
    for of_model, mixer in kinds:
        if mixer.kind == "index" and whole:
            continue
        packaged = surfaces(profile, mixer, part.kv_dtype) if mixer.measured_alike else None
        rows = None
        scaled = packaged is not None and packaged[1] and not has_joint_tables(profile.name)
        if packaged is None or scaled or library.is_module(model, of_model):
            rows = library.mixer_rows(profile, model, of_model, mixer)
        if rows is not None:
            read_bytes = mixer.reads * part.kv_dtype_bytes if mixer.measured_alike and not rows.module else 0.0
            raw = library_surfaces(rows, read_bytes / profile.bandwidth_bytes_per_s)
            notes.append((f"{KINDS_IN_WORDS.get(mixer.kind, 'attention')} of {mixer.layers} layers", rows.origin))
            whole |= {mixer.kind, "index"} if rows.module else set()
        elif packaged is not None:
            raw, warnings = packaged[0], [*warnings, *packaged[1], *(library.hint(profile) if scaled else ())]
        elif mixer.measured_alike:
            return None
        else:
            raw = estimated_surfaces(profile, mixer, part.kv_dtype_bytes)
            warnings += [not_measured(mixer, part.layers, profile.name), *library.hint(profile)]
        window = 0 if rows is not None and rows.module else mixer.window
        tables = raw.tables(host.mixed_excess, window)
        state_s = mixer.state_bytes / (profile.bandwidth_bytes_per_s * BANDWIDTH_SHARE)
        layers.append((mixer.layers, replace(tables, draft_state_s=state_s) if state_s else tables))
    return _Mixing(tuple(layers), frozenset(whole), tuple(dict.fromkeys(warnings)), tuple(notes))


def _types(model: ModelGeometry) -> str:
    """The types of the weights, those of the most bytes first."""
    return " and ".join(dict.fromkeys((model.dtype_of_experts, *model.weight_dtypes)))


def _provenance(profile: DeviceProfile, model: ModelGeometry, host: HostCosts) -> str:
    joint = has_joint_tables(profile.name)
    kinds = ("mixed", "layer") if profile.name == "rtx-4090" else ("gemm", "mixed" if joint else "decode")
    packaged = has_joint_tables(profile.name) or select("gemm", device=profile.name).num_rows
    tables = "; ".join(dict.fromkeys(source(kind) for kind in kinds)) if packaged else "of the library below"
    mixed = "mixed attention measured" if joint else f"mixed attention: {profile.mixed_note}"
    types = "" if model.plain else f"; weights in {_types(model)}, KV cache in {model.kv_dtype}"
    return f"kernel tables: {tables}; {mixed}{types}; host constants: {host.source}"
