"""The settings of one cell of a sweep, named as the options of ``ebbench run``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

import ebbench
from ebbench.engines.base import EngineOptions
from ebbench.errors import UsageError

KEY_FORMAT = 1
"""Part of every key: raised when the same settings would mean another result."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a cell depends on. Units as in ``ebbench run``; None takes that command's default."""

    workload: str
    policy: str = "v1"
    engine: str = "sim"
    device: str = "rtx-pro-6000"
    model: str = "qwen3-8b"
    scenario: str | None = None
    seed: int = 0
    num_prompts: int | None = None
    source: str = "auto"
    max_concurrency: int | None = None
    request_rate: float | None = None
    burstiness: float | None = None
    input_len: int | None = None
    output_len: int | None = None
    length_distribution: str | None = None
    speed: float | None = None
    time_unit: str | None = None
    duration_s: float | None = None
    tokenizer: str | None = None
    drop_too_long: bool = False
    max_num_seqs: int = EngineOptions.max_num_seqs
    max_num_batched_tokens: int = EngineOptions.max_num_batched_tokens
    max_model_len: int = EngineOptions.max_model_len
    block_size: int = EngineOptions.block_size
    num_kv_blocks: int | None = EngineOptions.num_kv_blocks
    enable_prefix_caching: bool = EngineOptions.enable_prefix_caching
    async_scheduling: bool = EngineOptions.async_scheduling
    long_prefill_token_threshold: int = EngineOptions.long_prefill_token_threshold
    enforce_eager: bool = EngineOptions.enforce_eager
    warmup: int = EngineOptions.warmup
    quantization: str | None = EngineOptions.quantization
    kv_cache_dtype: str = EngineOptions.kv_cache_dtype
    gpu_memory_utilization: float = 0.9
    cost: str = "auto"
    goodput: str = ""

    @property
    def options(self) -> EngineOptions:
        """The scheduler settings."""
        return EngineOptions(**{name: getattr(self, name) for name in EngineOptions.__dataclass_fields__})

    def plan_settings(self) -> dict[str, Any]:
        """What the plan depends on, as arguments of ``build_plan``. Simulated engines read no texts."""
        texts = self.engine not in ("sim", "emulated")
        return {name: getattr(self, name) for name in _PLAN} | {"with_text": texts}


_PLAN = (
    "workload", "scenario", "num_prompts", "seed", "source", "max_concurrency", "request_rate", "burstiness",
    "input_len", "output_len", "length_distribution", "speed", "time_unit", "duration_s", "tokenizer",
    "drop_too_long",
    "max_model_len",
)  # fmt: skip
FILES = ("workload", "scenario", "source", "model", "device", "tokenizer")
"""Settings that may name a file of the user's, whose content then counts."""


def cell_key(settings: Settings) -> str:
    """Sixteen hex digits over the settings, the content of the files they name, and ebbench's version."""
    content = {
        "format": KEY_FORMAT,
        "ebbench": ebbench.__version__,
        "settings": msgspec.to_builtins(settings),
        "files": {name: digest for name in FILES if (digest := _digest(getattr(settings, name)))},
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def with_absolute_paths(settings: Settings) -> Settings:
    """The same settings for a worker with another working directory."""
    changes = {}
    for name in FILES:
        value = getattr(settings, name)
        path = _file(value)
        if path is not None:
            prefix = value.partition(":")[0] + ":" if value.startswith(_PREFIXES) else ""
            changes[name] = f"{prefix}{path.resolve()}"
    return msgspec.structs.replace(settings, **changes)


_PREFIXES = ("trace:", "file:")


def _file(value: str | None) -> Path | None:
    if not value:
        return None
    text = value.partition(":")[2] if value.startswith(_PREFIXES) else value
    path = Path(text).expanduser()
    return path if path.is_file() else None


def _digest(value: str | None) -> str:
    path = _file(value)
    if path is None:
        return ""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error})") from None


def described(settings: Mapping[str, Any], axes: tuple[str, ...]) -> str:
    """A cell in words: its place on the axes that vary."""
    return ", ".join(f"{name}={settings[name]}" for name in axes) or "the only cell"
