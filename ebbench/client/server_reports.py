"""What a server says of its own settings in /metrics: vLLM its KV cache, vllm_eb its policy."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from ebbench.client.blocking import run_to_end
from ebbench.client.scrape import parse
from ebbench.client.server_numbers import finite_number, whole_number
from ebbench.client.server_queries import ServerQueries
from ebbench.config.server_url import ServerUrl
from ebbench.spec.client import ClientOptions

POLICY = "policy"
_POLICY_INFO, _CACHE_INFO = "vllm_eb_info", "vllm:cache_config_info"


def _truth(text: str) -> bool:
    return {"True": True, "False": False}[text]


def _count(text: str) -> int | None:
    return whole_number(finite_number(text), at_least=1, at_most=2**53)


_OF_CACHE: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "num_gpu_blocks": ("num_kv_blocks", _count),
    "block_size": ("block_size", _count),
    "kv_cache_size_tokens": ("kv_cache_tokens", _count),
    "cache_dtype": ("kv_cache_dtype", str),
    "enable_prefix_caching": ("enable_prefix_caching", _truth),
    "gpu_memory_utilization": ("gpu_memory_utilization", finite_number),
}
"""vLLM's labels, with our names and types of their values."""


def reported_settings(samples: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """The settings in ``samples``, pairs of a metric's name and its labels as JSON; empty if there are none.

    A setting in which the engines of a server differ is left out.
    """
    found: dict[str, set[Any]] = {}
    for name, labels in samples:
        if name == _POLICY_INFO:
            found.setdefault(POLICY, set()).add(msgspec.json.decode(labels).get("policy"))
        elif name == _CACHE_INFO:
            for ours, value in _cache_settings(msgspec.json.decode(labels)):
                found.setdefault(ours, set()).add(value)
    return {name: values.pop() for name, values in found.items() if len(values) == 1 and values != {None}}


def _cache_settings(labels: Mapping[str, str]) -> Iterable[tuple[str, Any]]:
    for theirs, (ours, kind) in _OF_CACHE.items():
        with contextlib.suppress(KeyError):  # another version of vLLM, or not known yet ("None")
            if (value := kind(labels[theirs])) is not None:
                yield ours, value


def read_reports(url: str, options: ClientOptions, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Ask the server at ``url``, once it is ready; empty if it has no /metrics. Raises RunError if it is not ready."""

    async def ask() -> str | None:
        async with ServerQueries(ServerUrl.parse(url), options, environ) as server:
            await server.ready()
            return await server.metrics()

    return reported_settings(parse(run_to_end(ask) or ""))
