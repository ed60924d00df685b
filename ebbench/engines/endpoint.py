"""Engine for any OpenAI-compatible server: the load generator behind the engine interface.

:func:`drive` is what other engines that talk to a server (``vllm``) call; it shows engine observers the client's
snapshots and returns what :func:`ebbench.client.drive` returns. The settings are
:class:`ebbench.client.ClientOptions`: model, endpoint (completions or chat), workers, timeouts, warm-up, headers
and further fields of the request body, prefix-cache reset, reading of /metrics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa

from ebbench import client
from ebbench.client import ClientOptions, DriveResult
from ebbench.client.drive import server_url
from ebbench.client.progress import Snapshot
from ebbench.devices.base import Device
from ebbench.engines.base import EngineOptions, EngineResult, Observer, Progress
from ebbench.records.plan import Plan
from ebbench.records.schema import DECISIONS, STEPS
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
    """Send ``plan`` to the server at ``url``; ``observer`` sees progress under ``label``.

    Raises UsageError when the plan does not suit the server, RunError when the server is not there.
    """
    shown = None if observer is None else _Shown(observer, label)
    return client.drive(url, plan, options, shown, on_batch)


def warmed(client: ClientOptions, options: EngineOptions) -> ClientOptions:
    """The load generator's options with the warm-up that the engine's options ask for."""
    return replace(client, warmup=options.warmup) if options.warmup else client


@dataclass(kw_only=True)
class SendingEngine:
    """What every engine has that sends requests to a server.

    ``client``: the load generator's options. ``on_batch`` gets finished requests while the run goes on. ``log`` is
    where the output of servers goes that the engine starts.
    """

    client: ClientOptions = field(default_factory=ClientOptions)
    on_batch: Callable[[pa.Table], None] | None = None
    log: Path | None = None


@dataclass
class EndpointEngine(SendingEngine):
    """Runs plans on the server at ``url``. The policy is a label: the server schedules by its own settings.

    Raises UsageError for what is not a server's URL.
    """

    url: str
    name: str = "endpoint"

    def __post_init__(self) -> None:
        self.url = server_url(self.url)

    def run(
        self, plan: Plan, policy: PolicySpec, device: Device, options: EngineOptions, observer: Observer | None
    ) -> EngineResult:
        """Carry out the plan. Raises UsageError, RunError; see :func:`drive`."""
        client = warmed(self.client, options)
        done = drive(self.url, plan, client, observer, label=policy.name, on_batch=self.on_batch)
        return EngineResult(
            requests=done.requests,
            steps=STEPS.empty_table(),
            decisions=DECISIONS.empty_table(),
            warnings=done.warnings,
            interrupted=done.interrupted,
            invalid=done.invalid,
            facts=done.facts,
            server_metrics=done.server_metrics,
        )


class _Shown:
    """The client's snapshots in the shape engine observers know."""

    def __init__(self, observer: Observer, label: str) -> None:
        self._observer, self._label = observer, label

    def update(self, snapshot: Snapshot) -> None:
        """Pass a snapshot on."""
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
