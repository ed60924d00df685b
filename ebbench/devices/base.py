"""The interface of a device: a cost model, a KV capacity and a controller calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from vllm_eb.calibration import Calibration

if TYPE_CHECKING:
    from ebbench.devices.geometry import ModelGeometry
    from ebbench.devices.profiles import DeviceProfile
    from ebbench.devices.request import DeviceRequest


class StepShape(NamedTuple):
    """Composition of one engine step, all a cost model may look at.

    ``prefill`` holds ``(chunk_tokens, context_tokens)`` per prefilling sequence: tokens computed in this step
    and tokens already in the KV cache before it. ``decode_kv_tokens`` is the sum over decoding sequences of
    their context (KV tokens read by attention). ``sampled_seqs`` is how many sequences produce a token:
    all decodes and the prefills that complete.
    """

    prefill: tuple[tuple[int, int], ...]
    decode_seqs: int
    decode_kv_tokens: int
    sampled_seqs: int


class CostModel(Protocol):
    """Time of one engine step. Must be a pure function of the shape, and fast: 10 us at most."""

    def step_s(self, shape: StepShape) -> float:
        """Seconds from the start of the step to its sampled tokens."""
        ...


@runtime_checkable
class PassCost(CostModel, Protocol):
    """A cost model that knows what one pass of several units takes whose experts are shared."""

    def pass_s(self, shapes: Sequence[StepShape], units: int) -> float:
        """Seconds of one pass of ``units`` units; ``shapes`` are those of the units that have work."""
        ...


@dataclass(frozen=True)
class Device:
    """A GPU (or CPU) holding a model, as an engine sees it.

    ``profile`` and ``geometry`` are what the cost model was built from and ``request`` what was asked for; None for a
    device made by hand. A topology of several GPUs per unit needs them, and must not look them up again by name: a
    model read from a config.json has none.
    ``costs_known`` False: ``calibration`` is a placeholder. ``kv_capacity_tokens`` 0: not known.
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
