"""Interface of a device: cost model, KV capacity and controller calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from vllm_eb.calibration import Calibration

if TYPE_CHECKING:
    from ebbench.devices.geometry import ModelGeometry
    from ebbench.devices.kv_layout import KvLayout
    from ebbench.devices.profiles import DeviceProfile
    from ebbench.devices.request import DeviceRequest


class StepShape(NamedTuple):
    """Composition of one engine step, the only input of a cost model.

    ``prefill``: ``(chunk_tokens, context_tokens)`` per prefilling sequence: tokens computed in this step, and tokens in
    the KV cache before it. ``decode_kv_tokens``: sum of the contexts of decoding sequences (KV tokens read by
    attention). ``sampled_seqs``: number of sequences that produce a token: all decodes and the prefills that complete.
    ``draft_tokens``: drafted tokens that the decodes verify, each one token of the step more; contexts include them.
    """

    prefill: tuple[tuple[int, int], ...]
    decode_seqs: int
    decode_kv_tokens: int
    sampled_seqs: int
    draft_tokens: int = 0


@dataclass(frozen=True)
class Drafter:
    """What drafts the tokens of speculative decoding, in parts of the target model: ``passes`` per step, each of
    ``layer_share`` of its layers (``layers`` of them with attention) and of ``head_share`` of its language head. The
    first pass computes all tokens of the step, each further one a token per sequence."""

    passes: int
    layers: int
    layer_share: float
    head_share: float


class CostModel(Protocol):
    """Time of one engine step. It must be a pure function of the shape and take at most 10 us."""

    def step_s(self, shape: StepShape) -> float:
        """Time (s) from the start of the step to its sampled tokens."""
        ...


@runtime_checkable
class PassCost(CostModel, Protocol):
    """A cost model that also knows the duration of a pass of several units with shared experts."""

    def pass_s(self, shapes: Sequence[StepShape], units: int) -> float:
        """Time (s) of one pass of ``units`` units; ``shapes``: those of the units that have requests."""
        ...


@dataclass(frozen=True)
class Device:
    """A GPU (or CPU) serving a model, as an engine sees it.

    ``profile`` and ``geometry``: what the cost model was built from; ``request``: the arguments it was loaded with;
    None for a device made by hand. Topologies with several GPUs per unit need them and must not look them up by name: a
    model read from a config.json has no known name. ``costs_known`` False: ``calibration`` is a placeholder.
    ``kv_capacity_tokens`` 0: unknown. ``identity``: what tells it from others of its name, by name
    (:mod:`ebbench.devices.profiles`). ``kv_layout``: how blocks are given to layers that keep a window or a state; None
    where every layer keeps every token.
    """

    name: str
    model: str
    cost: CostModel
    kv_capacity_tokens: int
    calibration: Calibration
    provenance: str
    warnings: tuple[str, ...] = field(default=())
    profile: DeviceProfile | None = None
    geometry: ModelGeometry | None = None
    request: DeviceRequest | None = None
    costs_known: bool = True
    identity: tuple[tuple[str, str], ...] = ()
    kv_layout: KvLayout | None = None

    @property
    def sources(self) -> str:
        """Where its numbers come from: those of the steps, and of the KV cache where its size is an estimate."""
        if self.request is None or self.request.kv_tokens is not None:
            return self.provenance
        return f"{self.provenance}; KV cache as vLLM {self.request.vllm} sizes it"
