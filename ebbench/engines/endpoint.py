"""Engine for any OpenAI-compatible server: the load generator behind the engine interface.

Other engines that send requests to a server (``vllm``) also call :func:`drive`, which converts the client's snapshots
for engine observers and returns what the load generator returns. Its settings are
:class:`ebbench.spec.client.ClientOptions`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa

from ebbench.client import load_generator
from ebbench.client.load_generator import DriveResult
from ebbench.client.progress import Snapshot
from ebbench.config.server_url import ServerUrl
from ebbench.devices.base import Device
from ebbench.engines.base import (
    EngineResult,
    Observer,
    Progress,
    changed_settings,
    refuse_server_settings,
    refuse_simulated,
)
from ebbench.engines.machine import machine_behind
from ebbench.records.plan import Plan
from ebbench.records.schema import DECISIONS, STEPS
from ebbench.spec.client import ClientOptions
from ebbench.spec.server import EngineOptions
from vllm_eb.policy import PolicySpec


def drive(
    url: str,
    plan: Plan,
    options: ClientOptions,
    observer: Observer | None = None,
    *,
    label: str = "endpoint",
    on_batch: Callable[[pa.Table], None] | None = None,
) -> DriveResult:
    """Send ``plan`` to the server at ``url``; ``observer`` receives progress under ``label``.

    Raises UsageError if the plan does not fit the server, RunError if the server cannot be reached.
    """
    shown = None if observer is None else _Shown(observer, label)
    return load_generator.drive(url, plan, options, shown, on_batch)


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
        """Run the plan. Raises UsageError, RunError; see :func:`drive`."""
        refuse_simulated(vars(options), self.name)
        refuse_server_settings(self.url, changed_settings(options))
        client = warmed(self.client, options)
        done = drive(self.url, plan, client, observer, label=policy.name, on_batch=self.on_batch)
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


class _Shown:
    """Converts the client's snapshots for an engine observer."""

    def __init__(self, observer: Observer, label: str) -> None:
        self._observer, self._label = observer, label

    def update(self, snapshot: Snapshot) -> None:
        """Convert and pass on a snapshot."""
        self._observer.update(
            Progress(
                policy=self._label,
                completed=snapshot.completed,
                planned=snapshot.planned,
                output_tokens=snapshot.output_tokens,
                total_tokens=snapshot.total_tokens,
                time_s=snapshot.time_s,
                mode="",
                running=snapshot.open_requests,
                waiting=0,
                failures=snapshot.failures,
                ttft_ms=snapshot.ttft_ms,
                tpot_ms=snapshot.tpot_ms,
            )
        )
