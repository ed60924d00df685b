"""Engine for any OpenAI-compatible server: the load generator behind the engine interface.

Its settings are :class:`ebbench.spec.client.ClientOptions`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa

from ebbench.client.load_generator import drive
from ebbench.config.server_url import ServerUrl
from ebbench.devices.base import Device
from ebbench.engines.base import EngineResult, changed_settings, refuse_server_settings, refuse_simulated
from ebbench.engines.machine import machine_behind
from ebbench.records.plan import Observer, Plan
from ebbench.records.schema import DECISIONS, STEPS
from ebbench.spec.client import ClientOptions
from ebbench.spec.server import EngineOptions
from vllm_eb.policy import PolicySpec


def warmed(client: ClientOptions, options: EngineOptions) -> ClientOptions:
    """The load generator's options with the warm-up of the engine's options."""
    return replace(client, warmup=options.warmup) if options.warmup else client


@dataclass(kw_only=True)
class SendingEngine:
    """Common settings of engines that send requests to a server.

    ``client``: options of the load generator. ``on_batch`` receives finished requests during the run. ``log``: where
    the output of servers goes that the engine starts.
    """

    client: ClientOptions = field(default_factory=ClientOptions)
    on_batch: Callable[[pa.Table], None] | None = None
    log: Path | None = None


@dataclass
class EndpointEngine(SendingEngine):
    """Runs plans on the server at ``url``. The policy is only a label: the server schedules by its own settings.

    Raises UsageError for an invalid URL.
    """

    url: str
    name: str = "endpoint"

    def __post_init__(self) -> None:
        self.url = str(self.url).strip()
        ServerUrl.parse(self.url)

    def run(
        self, plan: Plan, policy: PolicySpec, device: Device, options: EngineOptions, observer: Observer | None
    ) -> EngineResult:
        """Run the plan. Raises UsageError if the plan does not fit the server, RunError if it cannot be reached."""
        refuse_simulated(vars(options), self.name)
        refuse_server_settings(self.url, changed_settings(options))
        client = warmed(self.client, options)
        done = drive(self.url, plan, client, observer, self.on_batch, label=policy.name)
        return EngineResult(
            requests=done.requests,
            steps=STEPS.empty_table(),
            decisions=DECISIONS.empty_table(),
            warnings=done.warnings,
            interrupted=done.interrupted,
            invalid=done.invalid,
            facts={**done.facts, "server_machine": machine_behind(str(done.facts["server"]))},
            server_metrics=done.server_metrics,
        )
