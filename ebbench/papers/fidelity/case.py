"""What a case is: a published run with its results, and the rows of reference data that cases are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ebbench.papers.protocols import ASYNC_SCHEDULING, VLLM, Protocol
from ebbench.papers.published import GPUS
from ebbench.spec.server import AUTO

DEVICES = {title: name for name, title in GPUS.items()}
MODELS = {"Qwen3-8B": "qwen3-8b", "Qwen3-30B-A3B": "qwen3-30b-a3b"}
# The rows on which constants were fitted: reports/fidelity/notes/constants.md says which constant on which row.
FIT_ROWS = ("c=32", "c=512")  # of table 3: the host's constants
KV_SIZE_ROW = ("c=2048", "RTX PRO 6000")  # of table 3: memory that the papers' servers leave for the KV cache
GEMM_FACTOR_ROW = ("H200", "Qwen3-8B", "LongBench")  # of table 2 and figure 5: arithmetic of matrix products
GEMM_FACTOR_WORKLOAD = "prefill_heavy"  # of figure 3: the same
CONNECTOR_SETTING = ("prefill-heavy", "1p3d")  # of table 20, where one GPU's prefill is the limit: the KV connector


@dataclass(frozen=True)
class Published:
    """A published number: metric name (with unit), value, and whether it is scored."""

    metric: str
    value: float
    source: str
    scored: bool = True
    note: str = ""


@dataclass(frozen=True)
class Case:
    """One run to repeat, with its published results.

    ``quantization`` as named by vLLM; ``kv_cache_dtype``, ``moe_backend``, ``async_scheduling``,
    ``scheduler_reserve_full_isl``, ``vllm_version``, ``api_server``, ``front_end_ms`` and ``gpu_memory_utilization`` as
    in EngineOptions. ``refused``:
    why no simulated server can make the run; it then has no figures of ours.
    """

    name: str
    device: str
    model: str
    scheduler: str
    protocol: Protocol
    published: tuple[Published, ...]
    fitted: bool = False
    group: str = ""
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    moe_backend: Literal["auto", "marlin"] = "auto"
    async_scheduling: bool = ASYNC_SCHEDULING
    scheduler_reserve_full_isl: bool = True
    vllm_version: str = VLLM
    api_server: str = AUTO
    front_end_ms: float | None = 0.0
    gpu_memory_utilization: float | None = None
    refused: str = ""

    @property
    def sets_token_time(self) -> bool:
        """Whether the API server's time per token was set on this case, which is then fitted where it has one."""
        set_on = self.group in ("table 2 and figure 5", "authors' repetition") and self.name.endswith("ShareGPT")
        return set_on and self.device == "h200"
