"""Reads a server's metrics during a run, in long form: one row per sample that changed."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pyarrow as pa
from prometheus_client.parser import text_string_to_metric_families

from ebbench.client.server_numbers import finite_number
from ebbench.client.server_queries import ServerQueries
from ebbench.records.schema import SERVER_METRICS

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
