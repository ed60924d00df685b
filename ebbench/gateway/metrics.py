"""The gateway's metrics in the Prometheus text format."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_WAIT_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class GatewayMetrics:
    """Counters and gauges of one gateway, in its own registry."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.answers = Counter(
            "ebbench_gateway_answers", "Answers relayed, by upstream and outcome.", ["upstream", "outcome"],
            registry=self._registry,
        )  # fmt: skip
        self.retries = Counter(
            "ebbench_gateway_retries", "Requests sent on because an upstream gave no answer.", ["upstream"],
            registry=self._registry,
        )  # fmt: skip
        self.refused = Counter(
            "ebbench_gateway_refused", "Requests refused by the gateway itself, by status.", ["status"],
            registry=self._registry,
        )  # fmt: skip
        self.abandoned = Counter(
            "ebbench_gateway_abandoned", "Requests whose client left before the answer was complete.",
            registry=self._registry,
        )  # fmt: skip
        self.wait = Histogram(
            "ebbench_gateway_dispatch_wait_seconds", "Time requests wait for an upstream.", buckets=_WAIT_BUCKETS,
            registry=self._registry,
        )  # fmt: skip
        self.passes = Counter(
            "ebbench_gateway_forward_passes", "Ends of forward passes signalled or inferred.", ["upstream"],
            registry=self._registry,
        )  # fmt: skip
        self.open = self._gauge("open_requests", "Requests open, by upstream.", ["upstream"])
        self.active = self._gauge("upstream_active", "1 if the upstream takes requests.", ["upstream"])
        self.ejections = self._gauge("upstream_ejections", "Times the upstream was taken out.", ["upstream"])
        self.waiting = self._gauge("waiting", "Requests waiting for an upstream.", [])
        self.interval = self._gauge("dispatch_interval_seconds", "Interval of Algorithm 1.", [])
        self.forward = self._gauge("forward_seconds", "Mean duration of a forward pass.", [])

    def render(self) -> bytes:
        """The metrics page."""
        return generate_latest(self._registry)

    def _gauge(self, name: str, text: str, labels: list[str]) -> Gauge:
        return Gauge(f"ebbench_gateway_{name}", text, labels, registry=self._registry)
