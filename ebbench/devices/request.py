"""The arguments a device was loaded with, so that it can be loaded again for a unit of several GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ebbench.config.defaults import DEFAULT_VLLM
from ebbench.devices.geometry import KV_DTYPES, WEIGHT_BITS, ModelGeometry
from ebbench.devices.parallel import SINGLE, Parallel
from ebbench.devices.startup import start_up
from ebbench.errors import UnknownNameError, UsageError
from ebbench.spec.host import HostCosts
from ebbench.spec.speculative import Speculative

QUANTIZATIONS = ("fp8",)


@dataclass(frozen=True)
class DeviceRequest:
    """The arguments of :func:`ebbench.devices.loader.load_device`, which describes them."""

    name: str
    model: str
    cost: str = "auto"
    gpu_memory_utilization: float | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    async_scheduling: bool = True
    eager: bool = False
    host: HostCosts | None = None
    parallel: Parallel = SINGLE
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    kv_tokens: int | None = None
    vllm_version: str | None = None
    drafts: Speculative | None = None

    @property
    def vllm(self) -> str:
        """The version by whose rules the KV cache is sized."""
        return self.vllm_version or DEFAULT_VLLM

    @property
    def memory_share(self) -> float:
        """The share of each GPU's memory that the server may use."""
        given = self.gpu_memory_utilization
        return start_up(self.vllm).gpu_memory_utilization if given is None else given


def quantised(model: ModelGeometry, quantization: str | None, kv_cache_dtype: str) -> ModelGeometry:
    """The model with weights and KV cache converted by ``--quantization`` and ``--kv-cache-dtype``.

    vLLM's quantisation at load time has one scale per tensor; a model whose weights are already quantised keeps them.
    Raises UnknownNameError, or UsageError for weights that cannot be quantised again.
    """
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise UnknownNameError("quantization that is modelled", quantization, QUANTIZATIONS)
    kv = {"fp8_e4m3": "fp8", "auto": model.kv_dtype}.get(kv_cache_dtype, kv_cache_dtype)
    if kv not in WEIGHT_BITS or kv not in KV_DTYPES:
        raise UnknownNameError("KV cache dtype", kv_cache_dtype, KV_DTYPES)
    if quantization is None or model.weight_dtype.startswith(quantization):
        return replace(model, kv_dtype=kv)
    if not replace(model, kv_dtype="bfloat16").plain:
        raise UsageError(
            f"the weights of {model.name} are in {model.dtype_of_experts} already; leave out --quantization"
        )
    return replace(model, weight_dtype=quantization, attention_dtype="", expert_dtype="", kv_dtype=kv)
