"""Cost models: kernel tables (host + layers x (dense + attention) + head and sampler), closed forms, rooflines."""

from __future__ import annotations

import csv
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ebbench.config.declare import DEFAULT_VLLM
from ebbench.devices import library
from ebbench.devices.base import BANDWIDTH_SHARE, COMPUTE_SHARE, SINGLE, CostModel, Device, Drafter, Parallel, StepShape
from ebbench.devices.geometry import ModelGeometry, decode_flops, pair_flops
from ebbench.devices.launches import launch_s, prompt_launch_s
from ebbench.devices.layers import GRAPH_TOKENS, MAX_SAMPLED, MAX_TOKENS, PADDED, step_arrays
from ebbench.devices.library import select, table_source
from ebbench.devices.profiles import DATA, DeviceProfile, identity_given, list_devices
from ebbench.devices.surfaces import (
    KINDS_IN_WORDS,
    AttentionTables,
    estimated_surfaces,
    has_joint_tables,
    in_line,
    library_surfaces,
    not_measured,
    surfaces,
)
from ebbench.errors import UsageError
from ebbench.records.warnings import RunWarning
from ebbench.spec.server import HostCosts
from vllm_eb.calibration import Calibration, CalibrationError, CostGrid, MixedCost

# Rooflines: step times from data-sheet rates, for devices or models without measurements.


@dataclass(frozen=True)
class RooflineAttention:
    """Attention of all layers of one kind. ``kv_bytes``: read per token before a query; ``pair_flops`` and
    ``decode_flops``: operations per pair of a query and a key, in prompts and in decodes; ``window``: most tokens that
    a query reads, 0: all; ``state_bytes``: of a sequence, read and written in every step, and written once
    more per drafted token."""

    kv_bytes: float
    pair_flops: float
    decode_flops: float
    window: int = 0
    state_bytes: float = 0.0


@dataclass(frozen=True)
class RooflineCost:
    """Each layer takes the longer of its arithmetic and its memory traffic; attention is added."""

    dense_params: float  # parameters used by every token, without the language head
    expert_params: float  # parameters of all experts together, in all layers
    expert_share: float  # share of the experts one token uses
    head_params: float
    attention: tuple[RooflineAttention, ...]
    dense_bytes: float  # of the dense parameters in memory
    expert_bytes: float
    head_bytes: float
    flops_per_s: float
    bytes_per_s: float
    host: HostCosts
    drafter: Drafter | None = None
    overlap: bool = False  # asynchronous scheduling: the host's time counts only if it is longer than the GPU's

    def step_s(self, shape: StepShape) -> float:
        """Time (s) of one step."""
        tokens = shape.decode_seqs + shape.draft_tokens + sum(chunk for chunk, _ in shape.prefill)
        attention = sum(self._attention_s(kind, shape) for kind in self.attention)
        active = self.dense_params + self.expert_params * self.expert_share
        touched = self.expert_bytes * (1.0 - (1.0 - self.expert_share) ** tokens)
        layers = max(
            2.0 * tokens * active / self.flops_per_s,
            (self.dense_bytes + touched) / self.bytes_per_s,
        )
        head = self._head_s(shape.sampled_seqs + shape.draft_tokens)
        sequences = shape.decode_seqs + len(shape.prefill)
        host, gpu = self.host.step_s + self.host.sequence_s * sequences, layers + head + attention
        if (drafter := self.drafter) is not None:
            weights = (self.dense_bytes + touched) / self.bytes_per_s
            drafted = drafter.passes if shape.next_drafts is None else shape.next_drafts
            passes = max(drafted, 1)  # the first also runs for the drafter's own KV
            layer = max(layers, weights) + (passes - 1) * max(layers * sequences / tokens, weights)
            gpu += drafter.layer_share * (layer + passes * attention)
            gpu += drafted * drafter.head_share * self._head_s(sequences)
        return max(host, gpu) if self.overlap else host + gpu

    def _head_s(self, rows: int) -> float:
        return max(
            2.0 * rows * self.head_params / self.flops_per_s, self.head_bytes / self.bytes_per_s if rows else 0.0
        )

    def _attention_s(self, kind: RooflineAttention, shape: StepShape) -> float:
        kv_tokens = shape.decode_kv_tokens
        if kind.window:
            kv_tokens = min(kv_tokens, shape.decode_seqs * kind.window)
        queries = 1.0 + shape.draft_tokens / shape.decode_seqs if shape.draft_tokens else 1.0
        time = max(
            kv_tokens * kind.kv_bytes / self.bytes_per_s, queries * kv_tokens * kind.decode_flops / self.flops_per_s
        )
        for chunk, context in shape.prefill:
            pairs = chunk * (context + 0.5 * (chunk + 1))
            if kind.window:
                context = min(context, kind.window)
                pairs = min(pairs, chunk * (context + 0.5 * (min(chunk, kind.window) + 1)))
            time += max(pairs * kind.pair_flops / self.flops_per_s, context * kind.kv_bytes / self.bytes_per_s)
        sequences = shape.decode_seqs + len(shape.prefill)
        return time + (sequences * 2.0 + shape.draft_tokens) * kind.state_bytes / self.bytes_per_s


def roofline_cost(
    profile: DeviceProfile, model: ModelGeometry, host: HostCosts, *, overlap: bool = False
) -> RooflineCost:
    """Build the cost model from the profile's data-sheet rates and the model's shape."""
    _refuse_compressed(profile, model)
    experts = model.expert_layers * model.experts * model.expert_params
    total = model.layer_params
    attention = tuple(
        RooflineAttention(
            kv_bytes=mixer.layers * mixer.reads * model.kv_dtype_bytes,
            pair_flops=mixer.layers * pair_flops(mixer),
            decode_flops=mixer.layers * decode_flops(mixer) if mixer.latent else 0.0,
            window=mixer.window,
            state_bytes=mixer.layers * mixer.state_bytes,
        )
        for mixer in model.mixers
    )
    return RooflineCost(
        dense_params=total - experts,
        expert_params=experts,
        expert_share=model.experts_per_token / model.experts if model.experts else 0.0,
        head_params=model.vocab * model.hidden,
        attention=attention,
        dense_bytes=model.weight_bytes - model.encoder_bytes - model.experts_bytes - model.embedding_bytes,
        expert_bytes=model.experts_bytes,
        head_bytes=model.head_bytes,
        overlap=overlap,
        flops_per_s=profile.bf16_flops_per_s * COMPUTE_SHARE,
        bytes_per_s=profile.bandwidth_bytes_per_s * BANDWIDTH_SHARE,
        host=host,
    )


def _refuse_compressed(profile: DeviceProfile, model: ModelGeometry) -> None:
    """Raise UsageError for a model with compressed keys where its kernels were not measured: they have no formula."""
    if any(mixer.kind == "compressed" for mixer in model.mixers):
        hints = "".join(f"; {hint}" for hint in library.hint(profile))
        raise UsageError(
            f"{model.name} attends to compressed keys (CSA, HCA), whose kernels were not measured on {profile.name} in "
            "this shape, and there is no formula for them; they were on h100, h200, b200, b300, gb200 and gb300, with "
            f"tp 1, 2, 4 and 8, of DeepSeek-V4-Flash and -Pro{hints}"
        )


SOURCE = "weifang231/eb-vllm (Apache-2.0), calibration of Zhang et al., ICML 2026"
# The authors calibrated both releases of the same Llama weights.
_ALIASES = {"meta-llama/meta-llama-3.1-8b-instruct": "meta-llama/llama-3.1-8b-instruct"}


@dataclass(frozen=True)
class LinearCost:
    """Step time linear in tokens: prefill, decode, and mixed by the measured beta_mb(r) if there is one.

    A mixed step is never cheaper than either of its parts: the fitted polynomial falls below them for a few decodes
    with a very short chunk, outside the range it was fitted on. Without a measured mixed cost the parts are added, with
    the fixed cost counted once. ``kv_token_s``: seconds per KV token that a decode step reads; if set, the device is a
    unit of separate pools, whose decode steps cost nothing for the last prompt token of a joining request.
    """

    calibration: Calibration
    kv_token_s: float = 0.0

    def step_s(self, shape: StepShape) -> float:
        """Time (s) of one step; context lengths matter only through ``kv_token_s`` (docs/theory.md)."""
        cal = self.calibration
        tokens = 0
        for chunk, _ in shape.prefill:
            tokens += chunk
        n = shape.decode_seqs + shape.draft_tokens
        if not n:
            return cal.alpha_p + cal.beta_p * tokens
        if not tokens or self.kv_token_s:
            return cal.alpha_d + cal.beta_d * n + self.kv_token_s * shape.decode_kv_tokens
        if cal.mixed is None:
            return max(cal.alpha_p, cal.alpha_d) + cal.beta_p * tokens + cal.beta_d * n
        total = tokens + n
        alpha = cal.alpha_p if cal.alpha_mb is None else cal.alpha_mb
        mixed = alpha + cal.mixed.at(n / total) * total
        return max(mixed, cal.alpha_p + cal.beta_p * tokens, cal.alpha_d + cal.beta_d * n)


GIVEN = "linear:"
"""Prefix of the name of a device that is given by its constants."""


_MOST_KV_TOKENS = 1e15


def given_device(name: str, model: str) -> Device:
    """A device given as ``linear:alpha_p,beta_p,alpha_d,beta_d,KV[,kv_token]``: seconds, KV tokens, s per KV token.

    Raises UsageError for any other text.
    """
    try:
        values = [float(value) for value in name.removeprefix(GIVEN).split(",")]
        alpha_p, beta_p, alpha_d, beta_d, kv_tokens, kv_token_s = [*values, 0.0] if len(values) == 5 else values
    except ValueError:
        raise UsageError(
            f"device {name!r} is not {GIVEN}alpha_p,beta_p,alpha_d,beta_d,KV with five or six numbers"
        ) from None
    if not (1 <= kv_tokens <= _MOST_KV_TOKENS and 0 <= kv_token_s <= 1):
        raise UsageError(
            f"device {name!r}: KV must be at least 1 and at most {_MOST_KV_TOKENS:g} tokens, kv_token from 0 to 1 s"
        )
    costs = Calibration(alpha_p, beta_p, alpha_d, beta_d)
    cost = LinearCost(costs, kv_token_s)
    source, own = "linear cost model, constants as given", identity_given(cost, int(kv_tokens))
    return Device("linear", model, cost, int(kv_tokens), costs, source, identity=own)


def published_calibration(profile: DeviceProfile, model: ModelGeometry) -> Calibration | None:
    """The authors' coefficients for this device and model, or None if they published none."""
    key = model.hf_id.lower()
    for device in profile.calibration_names:
        calibration = _calibrations().get((device, key))
        if calibration is not None:
            mixed = next((_mixed()[d, key] for d in profile.calibration_names if (d, key) in _mixed()), None)
            return replace(calibration, mixed=mixed, margin=profile.margin_s_per_token)
    return None


@cache
def _calibrations() -> dict[tuple[str, str], Calibration]:
    return {
        (row["device_name"], _model_key(row["model"])): Calibration(
            alpha_p=float(row["alpha_p_s"]),
            beta_p=float(row["beta_p_s_per_token"]),
            alpha_d=float(row["alpha_d_s"]),
            beta_d=float(row["beta_d_s_per_seq"]),
            source=f"{SOURCE}, {row['source_file']}",
        )
        for row in _rows(DATA / "eb_vllm" / "calibration.csv")
    }


# Linear calibration of any cost model, on the grid that the EB authors calibrated on.


@cache
def _mixed() -> dict[tuple[str, str], MixedCost]:
    return {
        (row["device_name"], _model_key(row["model"])): MixedCost(
            a=float(row["a_s_per_token"]), b=float(row["b_s_per_token"]), c=float(row["c_s_per_token"])
        )
        for row in _rows(DATA / "eb_vllm" / "beta_mb.csv")
    }


def _model_key(name: str) -> str:
    return _ALIASES.get(name.lower(), name.lower())


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


PREFILL_TOKENS = (256, 512, 1024, 2048, 4096)
DECODE_SEQS = (16, 32, 64, 128, 256, 384, 512, 768, 1024)
DECODE_CONTEXT_TOKENS = 512
MIXED_TOKENS = 2048
MIXED_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)
LEAST_FIXED_S = 1e-6


def prefill_shape(tokens: int, context: int = 0) -> StepShape:
    """One prompt of ``tokens`` after ``context`` cached tokens, completing in this step."""
    return StepShape(((tokens, context),), 0, 0, 1)


def decode_shape(seqs: int, context: int, drafts: int = 0) -> StepShape:
    """``seqs`` decodes with ``context`` KV tokens and ``drafts`` drafted tokens per sequence."""
    return StepShape((), seqs, seqs * context, seqs, seqs * drafts)


def mixed_shape(tokens: int, share: float, context: int, drafts: int = 0) -> StepShape:
    """A step of ``tokens`` tokens, of which the share ``share`` are of decodes and the rest of one prompt."""
    seqs = min((tokens - 1) // (1 + drafts), max(1, round(tokens * share / (1 + drafts))))
    return StepShape(((tokens - seqs * (1 + drafts), 0),), seqs, seqs * context, seqs + 1, seqs * drafts)


def fit_calibration(cost: CostModel, source: str, margin: float, drafts: int = 0) -> Calibration:
    """Least squares of step times over the authors' grid, and beta_mb(r) from mixed steps of 2,048 tokens.

    With ``drafts`` drafted tokens per decode, decodes count by all of their tokens: ``beta_d`` and r are of tokens
    computed.
    """
    prefill_s = [cost.step_s(prefill_shape(x)) for x in PREFILL_TOKENS]
    alpha_p, beta_p = fixed_and_each(PREFILL_TOKENS, prefill_s)
    context = DECODE_CONTEXT_TOKENS
    seqs = [max(1, tokens // (1 + drafts)) for tokens in DECODE_SEQS]
    decode_s = [cost.step_s(decode_shape(n, context, drafts)) for n in seqs]
    alpha_d, beta_d = fixed_and_each([n * (1 + drafts) for n in seqs], decode_s)
    mixed_s = [cost.step_s(mixed_shape(MIXED_TOKENS, r, context, drafts)) for r in MIXED_SHARES]
    per_token = [(step_s - alpha_p) / MIXED_TOKENS for step_s in mixed_s]
    c, b, a = (float(v) for v in np.polyfit(MIXED_SHARES, per_token, 2))
    return Calibration(
        alpha_p=alpha_p,
        beta_p=beta_p,
        alpha_d=alpha_d,
        beta_d=beta_d,
        mixed=_fitted_mixed(a, b, c),
        margin=margin,
        source=source,
    )


GRID_TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192)
GRID_SEQS = (1, 16, 32, 64, 128, 256, 512, 1024, 2048)
GRID_CONTEXTS = (128, 512, 2048, 8192)
GRID_PROMPT_TOKENS = 512


def cost_grid(cost: CostModel, drafts: int = 0) -> CostGrid:
    """Step times on the grid for the policies that compare costs; prompt tokens come in prompts of 512.

    Every decode has ``drafts`` drafted tokens.
    """

    def step(tokens: int, seqs: int, context: int) -> float:
        full, rest = divmod(tokens, GRID_PROMPT_TOKENS)
        prompts = ((GRID_PROMPT_TOKENS, 0),) * full + (((rest, 0),) if rest else ())
        return cost.step_s(StepShape(prompts, seqs, seqs * context, seqs + len(prompts), seqs * drafts, drafts))

    return CostGrid(
        GRID_TOKENS,
        GRID_SEQS,
        GRID_CONTEXTS,
        tuple(step(x, 0, 0) for x in GRID_TOKENS),
        tuple(tuple(step(0, n, c) for c in GRID_CONTEXTS) for n in GRID_SEQS),
        tuple(tuple(tuple(step(x, n, c) for c in GRID_CONTEXTS) for n in GRID_SEQS) for x in GRID_TOKENS),
    )


def fixed_and_each(counts: Sequence[float], times_s: Sequence[float]) -> tuple[float, float]:
    """Fixed cost and cost per token or sequence in s: least squares, both at least zero.

    Absolute errors, as used by the authors. With relative errors the short steps would dominate, in which loading the
    weights takes a constant time: on L40S that gives a prefill 9.6 ms of fixed cost, which refills are too long to
    have, and EB with the resulting threshold is up to 9 % slower. The fixed cost is at least LEAST_FIXED_S: without a
    fixed cost of a decode step no threshold is defined.
    """
    x, y = np.asarray(counts, float), np.asarray(times_s, float)
    slope, fixed = (float(v) for v in np.polyfit(x, y, 1))
    if fixed < 0.0:
        fixed, slope = 0.0, float(x @ y / (x @ x))
    elif slope < 0.0:
        fixed, slope = float(y.mean()), 0.0
    return max(fixed, LEAST_FIXED_S), slope


def _fitted_mixed(a: float, b: float, c: float) -> MixedCost | None:
    """The fitted polynomial, or None if it is negative somewhere."""
    try:
        return MixedCost(a, b, c)
    except CalibrationError:
        return None


@dataclass(frozen=True)
class TableCost:
    """Step time from precomputed tables; a pure function of the shape, a few microseconds per call.

    ``attention``: layers of each kind, with the tables of one.
    ``dense_s`` is indexed by tokens, of a CUDA graph those of the graph; ``head_s`` by sampled sequences. ``launch_s``:
    least time to launch a step's kernels, of decodes (0 with CUDA graphs) and of steps with prompts. ``overlap``:
    asynchronous scheduling; the host prepares the next step while the GPU works, so its time counts only if it is
    longer. ``experts_s``, by the tokens of all units: only for a unit of an engine whose units share experts.
    ``drafter``: of a server with speculative decoding.
    """

    dense_s: array[float]
    head_s: array[float]
    attention: tuple[tuple[int, AttentionTables], ...]
    host: HostCosts
    overlap: bool
    launch_s: tuple[float, float] = (0.0, 0.0)
    experts_s: array[float] | None = None
    drafter: Drafter | None = None

    def step_s(self, shape: StepShape) -> float:
        """Time (s) from one step to the next: host and GPU one after the other, or overlapped."""
        prefill, seqs, _, _, _, _ = shape  # reading one field of a NamedTuple takes as long as unpacking all
        host = self.host.step_s + self.host.sequence_s * (seqs + len(prefill))
        gpu = self.gpu_s(shape)
        if self.experts_s is not None:
            gpu += self._experts_s(_tokens(shape))
        launch = self.launch_s[1 if prefill else 0]
        if gpu < launch:
            gpu = launch
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
        if not self.launch_s[0] and largest <= GRAPH_TOKENS:
            together = units * PADDED[largest]
        launch = max(self.launch_s[1 if shape.prefill else 0] for shape in shapes)
        gpu = max(max(self.gpu_s(shape) for shape in shapes) + self._experts_s(together), launch)
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
        elif not prefill:  # as tables.step_s has it: most steps
            context = kv_tokens / seqs if seqs else 0.0
            for layers, tables in self.attention:
                window = tables.window
                total += layers * tables.decode.at2(seqs, float(window) if window and context > window else context)
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


class Built(NamedTuple):
    """A cost model with its source and its warnings. ``library``: that the kernels' times come from, if it is not the
    packaged tables."""

    cost: CostModel
    provenance: str
    warnings: tuple[RunWarning, ...]
    library: str = ""

    @property
    def identity(self) -> tuple[tuple[str, str], ...]:
        """The kernel library as a manifest's fact; empty for the packaged tables."""
        return (("kernel_library", self.library),) if self.library else ()


def table_cost(
    profile: DeviceProfile,
    model: ModelGeometry,
    host: HostCosts,
    *,
    shape: Parallel = SINGLE,
    overlap: bool = True,
    eager: bool = False,
    vllm: str = DEFAULT_VLLM,
    marlin: bool = False,
) -> Built | None:
    """Build the model of one unit; None if the device has no kernel tables. ``vllm``, ``marlin``: see step_arrays."""
    mixing = _mixing(profile, model, shape, host)
    arrays = (
        None
        if mixing is None
        else step_arrays(profile, model, shape, eager=eager, whole=mixing.whole, vllm=vllm, marlin=marlin)
    )
    if arrays is None or mixing is None:
        return None
    dense = arrays.dense
    if not eager:
        dense[: GRAPH_TOKENS + 1] = dense[list(PADDED)]
    cost = TableCost(
        dense_s=in_line(dense),
        head_s=in_line(arrays.head),
        attention=mixing.layers,
        host=host,
        overlap=overlap,
        launch_s=(launch_s(model, shape),) * 2 if eager else (0.0, prompt_launch_s(model)),
        experts_s=None if arrays.experts is None else in_line(arrays.experts),
    )
    notes = (*arrays.notes, *mixing.notes)
    parts = (
        _provenance(profile, model, host), arrays.provenance, library.source(notes),
        f"eager mode: a step's kernels take at least {cost.launch_s[0] * 1e3:.1f} ms to launch" if eager else "",
    )  # fmt: skip
    warnings = (*arrays.warnings, *mixing.warnings, *library.warnings(notes, profile.name))
    return Built(
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
    timed: dict[int, int] = {}  # places of whole modules in ``layers``: two kinds may be timed alike (DeepSeek-V4)
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
            if rows.module and (place := timed.setdefault(id(rows), len(layers))) < len(layers):
                layers[place] = layers[place][0] + mixer.layers, layers[place][1]
                continue
        elif packaged is not None:
            raw, warnings = packaged[0], [*warnings, *packaged[1], *(library.hint(profile) if scaled else ())]
        elif mixer.measured_alike:
            return None
        else:
            _refuse_compressed(profile, model)
            raw = estimated_surfaces(profile, mixer, part.kv_dtype_bytes)
            warnings += [not_measured(mixer, part.layers, profile.name), *library.hint(profile)]
        window = 0 if rows is not None and rows.module else mixer.window
        tables = raw.tables(host.mixed_excess, window)
        state_s = mixer.state_bytes / (profile.bandwidth_bytes_per_s * BANDWIDTH_SHARE)
        layers.append((mixer.layers, replace(tables, draft_state_s=state_s) if state_s else tables))
    return _Mixing(tuple(layers), frozenset(whole), tuple(dict.fromkeys(warnings)), tuple(notes))


def _provenance(profile: DeviceProfile, model: ModelGeometry, host: HostCosts) -> str:
    joint = has_joint_tables(profile.name)
    kinds = ("mixed", "layer") if profile.name == "rtx-4090" else ("gemm", "mixed" if joint else "decode")
    packaged = has_joint_tables(profile.name) or select("gemm", device=profile.name).num_rows
    tables = "; ".join(dict.fromkeys(table_source(kind) for kind in kinds)) if packaged else "of the library below"
    mixed = "mixed attention measured" if joint else f"mixed attention: {profile.mixed_note}"
    weights = " and ".join(dict.fromkeys((model.dtype_of_experts, *model.weight_dtypes)))  # those of most bytes first
    types = "" if model.plain else f"; weights in {weights}, KV cache in {model.kv_dtype}"
    return f"kernel tables: {tables}; {mixed}{types}; host constants: {host.source}"
