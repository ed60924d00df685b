"""Reads a server's metrics during a run, in long form: one row per sample that changed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
import pyarrow as pa
from prometheus_client.parser import text_string_to_metric_families

from ebbench.client.server_numbers import finite_number, whole_number
from ebbench.client.server_queries import ServerQueries, run_to_end
from ebbench.config.server_url import ServerUrl
from ebbench.records.schema import SERVER_METRICS
from ebbench.spec.client import ClientOptions

_Key = tuple[str, str]


class Scraper:
    """Reads /metrics every ``interval_s`` seconds and keeps the samples that changed."""

    def __init__(self, server: ServerQueries, interval_s: float) -> None:
        self._server, self._interval_s = server, interval_s
        self._last: dict[_Key, float] = {}
        self._rows: list[tuple[int, str, str, float]] = []

    async def run(self) -> None:
        """Read until cancelled."""
        while await self.once():
            await asyncio.sleep(self._interval_s)

    async def once(self) -> bool:
        """Read once. Returns False if the server has no such page; a later read that fails is left out."""
        text = await self._server.metrics()
        if text is None:
            return bool(self._last)
        now_ns = time.monotonic_ns()
        for (name, labels), value in parse(text).items():
            if self._last.get((name, labels)) != value:
                self._last[name, labels] = value
                self._rows.append((now_ns, name, labels, value))
        return True

    def table(self, start_ns: int) -> pa.Table:
        """All samples so far, times relative to ``start_ns``; samples from before the run have negative times."""
        columns = {
            "time_ns": [time_ns - start_ns for time_ns, _, _, _ in self._rows],
            "name": [name for _, name, _, _ in self._rows],
            "labels": [labels for _, _, labels, _ in self._rows],
            "value": [value for _, _, _, value in self._rows],
        }
        return pa.table(columns, schema=SERVER_METRICS)


def parse(text: str) -> dict[_Key, float]:
    """Finite samples of a Prometheus text page by name and labels, without ``_created`` timestamps.

    NaN and infinity say that there is no value yet. A page that cannot be read has no samples.
    """
    try:
        return {
            (sample.name, msgspec.json.encode(sample.labels, order="sorted").decode()): value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if not sample.name.endswith("_created") and (value := finite_number(sample.value)) is not None
        }
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):  # what the parser raises for odd pages
        return {}


# What a server says of its own settings in /metrics: vLLM its KV cache, vllm_eb its policy.

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
