"""The plugin's metrics in vLLM's own /metrics.

vLLM finds this class by the entry point ``vllm.stat_logger_plugins`` and creates it in the process that serves
/metrics. It registers a collector, which reads :mod:`vllm_eb.reports` when Prometheus asks, so that an idle server
shows its last state. When vLLM logs its periodic line, it logs the same figures, one line per engine core.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector
from vllm.v1.metrics.loggers import StatLoggerBase

from vllm_eb.config import KEY, logger
from vllm_eb.reports import MODES, PHASES, Figures, read_figures

_MODE_NAMES = {"mb": "mixed", "eb": "exclusive"}
_LABELS = ("model_name", "engine")
_GAUGES = {
    "vllm_eb_refill_threshold_slots": ("k", "Idle slots that start a refill (k)."),
    "vllm_eb_running_limit_requests": ("n_limit", "Requests that may run at once (N)."),
    "vllm_eb_refill_threshold_share": ("theta", "The refill threshold as a share of the running limit (theta)."),
}
_COUNTERS = {
    "vllm_eb_mode_switches": ("mode_switches", "Changes between mixed and exclusive batches."),
    "vllm_eb_phase_switches": ("phase_switches", "Changes of what a step may contain."),
    "vllm_eb_refills": ("refills", "Changes to a phase that admits prompts."),
}


class PolicyCollector(Collector):
    """Collects the plugin's metrics of all engine cores of one server on this machine."""

    def __init__(self, instance: str, model_name: str, policy: str) -> None:
        self._instance, self._model_name, self._policy = instance, model_name, policy

    def describe(self) -> list[Metric]:
        """Empty: names are known only when figures exist."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One sample per figure and engine core; figures that the policy does not have are left out."""
        by_rank = [((self._model_name, str(rank)), figures) for rank, figures in read_figures(self._instance)]
        if not by_rank:
            return
        info = InfoMetricFamily("vllm_eb", "The scheduling policy.", labels=_LABELS)
        for labels, _ in by_rank:
            info.add_metric(labels, {"policy": self._policy})
        yield info
        yield _states("vllm_eb_mode", "Batches: mixed or exclusive (1: in force).", by_rank, _modes)
        yield _states("vllm_eb_phase", "What a step may contain (1: now).", by_rank, _phases)
        for name, (field, text) in _GAUGES.items():
            yield _samples(GaugeMetricFamily(name, text, labels=_LABELS), field, by_rank)
        for name, (field, text) in _COUNTERS.items():
            yield _samples(CounterMetricFamily(name, text, labels=_LABELS), field, by_rank)


_ByRank = list[tuple[tuple[str, str], Figures]]


def _modes(figures: Figures) -> dict[str, bool]:
    return {_MODE_NAMES[mode]: mode == figures.mode for mode in MODES}


def _phases(figures: Figures) -> dict[str, bool]:
    return {phase: phase == figures.phase for phase in PHASES}


def _states(name: str, text: str, by_rank: _ByRank, states: Any) -> Metric:
    """One gauge per state, 1 for the current one."""
    family = GaugeMetricFamily(name, text, labels=(*_LABELS, name.rpartition("_")[2]))
    for labels, figures in by_rank:
        for state, holds in states(figures).items():
            family.add_metric((*labels, state), float(holds))
    return family


def _samples(family: Any, field: str, by_rank: _ByRank) -> Metric:
    for labels, figures in by_rank:
        value = getattr(figures, field)
        if value is not None:
            family.add_metric(labels, float(value))
    metric: Metric = family
    return metric


def log_line(rank: int, policy: str, figures: Figures) -> str:
    """The figures of one engine core in one line."""
    phase = "" if figures.phase == "mixed" else f" ({figures.phase} phase)"
    parts = [f"{_MODE_NAMES[figures.mode]} batches{phase}, at most {figures.n_limit} requests running"]
    if figures.k is not None:
        share = "" if figures.theta is None else f" (theta {figures.theta:.2f})"
        parts.append(f"refill from {figures.k} idle slots{share}")
    switches = f"{figures.phase_switches} phase and {figures.mode_switches} mode switches"
    parts.append(f"{figures.refills} refills, {switches} so far")
    return f"vllm_eb engine {rank:03d}: policy {policy}: " + "; ".join(parts)


class PolicyStatLogger(StatLoggerBase):  # type: ignore[misc]
    """vLLM creates one per engine core; the first one registers the collector and logs for all.

    No metrics and no lines for other schedulers.
    """

    _registered: ClassVar[set[str]] = set()  # per process, like the registry

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._logs_for: str | None = None  # the engine's instance, if this object logs
        self._policy = ""
        self._last: dict[int, Figures] = {}
        settings = vllm_config.additional_config
        policy = settings.get(KEY) if isinstance(settings, Mapping) else None
        instance = vllm_config.instance_id
        if not isinstance(policy, Mapping) or instance in self._registered:
            return
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            logger.warning("vllm_eb: several API servers answer /metrics here, which then shows no policy figures")
            return
        self._registered.add(instance)
        named = policy.get("policy")
        self._logs_for, self._policy = instance, str(named.get("kind") if isinstance(named, Mapping) else named)
        model_name = vllm_config.model_config.served_model_name
        if isinstance(model_name, list):
            model_name = model_name[0]
        REGISTRY.register(PolicyCollector(instance, str(model_name), self._policy))

    def record(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing: figures are read when Prometheus asks."""

    def log_engine_initialized(self) -> None:
        """Do nothing."""

    def log(self) -> None:
        """Log the figures of each engine core whose figures have changed since the last line."""
        if self._logs_for is None:
            return
        for rank, figures in read_figures(self._logs_for):
            if self._last.get(rank) != figures:
                self._last[rank] = figures
                logger.info("%s", log_line(rank, self._policy, figures))
