"""The ``vllm`` engine with several servers behind the gateway."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ebbench.devices.base import Device
from ebbench.dispatch import DEFAULT_DISPATCH
from ebbench.engines.base import EngineOptions, EngineResult, Observer
from ebbench.engines.checks import refuse_api_server
from ebbench.engines.endpoint import drive, warmed
from ebbench.engines.machine import visible_gpus
from ebbench.engines.recorded import Recording
from ebbench.engines.vllm import (
    VllmEngine,
    await_records,
    engine_result,
    known_costs,
    prove_policy,
    reason_of_death,
    recording_of,
    server_environment,
    startup_progress,
)
from ebbench.engines.vllm_command import Serving, executable_line
from ebbench.engines.vllm_server import ServerProcess, free_port
from ebbench.errors import RunError, UsageError
from ebbench.gateway.process import GatewayProcess
from ebbench.gateway.settings import GatewaySettings
from ebbench.records.plan import Plan
from vllm_eb.policy import PolicySpec


@dataclass
class ReplicatedVllmEngine(VllmEngine):
    """``replicas`` equal servers behind a gateway with dispatch policy ``dispatch``.

    Each server gets its own GPU if there are enough; otherwise they share, which tests dispatch but not speed. With
    ``sbs`` every server publishes the ends of its forward passes.
    """

    replicas: int = 2
    dispatch: str = DEFAULT_DISPATCH

    def run(
        self, plan: Plan, policy: PolicySpec, device: Device, options: EngineOptions, observer: Observer | None = None
    ) -> EngineResult:
        """Run to the end of the plan. Raises what :meth:`VllmEngine.run` raises."""
        refuse_api_server(options, self.name)
        logs = Path(tempfile.mkdtemp(prefix="ebbench-vllm-"))  # kept if the run fails
        with tempfile.TemporaryDirectory(prefix="ebbench-record-") as folder, ExitStack() as stack:
            recorded = not policy.native or self.record_v1
            records = [Path(folder) / f"steps-{i}" if recorded else None for i in range(self.replicas)]
            servings = self._servings(policy, device, options, records)
            servers = self._start(servings, logs, stack)
            for server, record in zip(servers, records, strict=True):
                server.wait_ready(self.ready_timeout_s, startup_progress(observer, policy, plan, server.log))
                if record is not None:
                    prove_policy(record, policy, server)
            gateway = stack.enter_context(GatewayProcess(self._gateway(servings, options)))
            client = warmed(self.client_for(servings[0].model), options)
            try:
                done = drive(gateway.url, plan, client, observer, label=policy.name, on_batch=self.on_batch)
            except RunError:
                for server in servers:
                    server.check_alive("died")
                raise
            died = tuple(reason for server in servers for reason in reason_of_death(server, done))
            gateway.stop()
            if not died:
                await_records(records)
            for server in servers:
                server.stop()  # so that its record is complete
            recordings = [recording_of(record, plan, done) for record in records]
        facts = {
            "replicas": self.replicas,
            "dispatch": self.dispatch,
            **self.facts(servings[0], self._keep(logs)),
        }
        return engine_result(done, merged([r for r in recordings if r is not None]), facts, died)

    def _servings(
        self,
        policy: PolicySpec,
        device: Device,
        options: EngineOptions,
        records: Sequence[Path | None],
    ) -> list[Serving]:
        calibration = known_costs(device)
        signalled = self.dispatch.partition(":")[0] == "sbs"
        servings = []
        for record in records:
            serving = self.serving(policy, calibration, options, record, device.model)
            endpoint = f"tcp://127.0.0.1:{free_port()}" if signalled else None
            servings.append(replace(serving, signals=endpoint))
        if len({s.port for s in servings} | {s.signals for s in servings if s.signals}) < self.replicas:
            raise UsageError("could not find free ports for the servers; try again")
        return servings

    def _start(self, servings: Sequence[Serving], logs: Path, stack: ExitStack) -> list[ServerProcess]:
        gpus = len(visible_gpus())
        servers = []
        for index, serving in enumerate(servings):
            environment = server_environment()
            if gpus >= len(servings) and "CUDA_VISIBLE_DEVICES" not in os.environ:
                environment["CUDA_VISIBLE_DEVICES"] = str(index)
            url = f"http://{serving.host}:{serving.port}"
            log = logs / f"server-{index}.log"
            servers.append(stack.enter_context(ServerProcess(executable_line(serving), url, log, environment)))
        return servers

    def _gateway(self, servings: Sequence[Serving], options: EngineOptions) -> GatewaySettings:
        return GatewaySettings(
            upstreams=tuple(f"http://{s.host}:{s.port}" for s in servings),
            dispatch=self.dispatch,
            port=0,
            signals=tuple(s.signals for s in servings if s.signals is not None),
            chunk_tokens=options.max_num_batched_tokens,
            drain_s=5.0,
        )

    def _keep(self, logs: Path) -> Path:
        """Join all logs in one file if the user asked for one."""
        if self.log is None:
            return logs
        with self.log.open("wb") as kept:
            for path in sorted(logs.glob("server-*.log")):
                kept.write(f"== {path.name}\n".encode() + path.read_bytes())
        shutil.rmtree(logs)
        return self.log


def merged(recordings: Sequence[Recording]) -> Recording | None:
    """Recordings of several servers as one: instances numbered, steps in scheduling order."""
    if not recordings:
        return None
    steps = pa.concat_tables(_of_instance(r.steps, i) for i, r in enumerate(recordings))
    steps = steps.take(pc.sort_indices(steps, sort_keys=[("scheduled_ns", "ascending"), ("instance", "ascending")]))
    numbered = pa.array(np.arange(steps.num_rows, dtype=np.int64))
    steps = steps.set_column(0, steps.schema.field(0), numbered)
    decisions = pa.concat_tables(_of_instance(r.decisions, i) for i, r in enumerate(recordings))
    return Recording(
        steps=steps,
        decisions=decisions.take(pc.sort_indices(decisions, sort_keys=[("time_ns", "ascending")])),
        pids=frozenset().union(*(r.pids for r in recordings)),
        policies=frozenset().union(*(r.policies for r in recordings)),
    )


def _of_instance(table: pa.Table, instance: int) -> pa.Table:
    index = table.column_names.index("instance")
    values = pa.array(np.full(table.num_rows, instance, np.int32))
    return table.set_column(index, table.schema.field(index), values)
