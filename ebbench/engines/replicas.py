"""The ``vllm`` engine with several servers behind the gateway."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ebbench.devices.base import Device
from ebbench.dispatch import DEFAULT_DISPATCH
from ebbench.engines.base import EngineOptions
from ebbench.engines.checks import refuse_api_server
from ebbench.engines.machine import visible_gpus
from ebbench.engines.started import StartedServers
from ebbench.engines.vllm import (
    VllmEngine,
    known_costs,
    prove_policy,
    server_environment,
)
from ebbench.engines.vllm_command import Serving, executable_line
from ebbench.engines.vllm_server import ServerProcess, free_port
from ebbench.errors import UsageError
from ebbench.gateway.process import GatewayProcess
from ebbench.gateway.settings import GatewaySettings
from vllm_eb.policy import PolicySpec


@dataclass
class ReplicatedVllmEngine(VllmEngine):
    """``replicas`` equal servers behind a gateway with dispatch policy ``dispatch``.

    Each server gets its own GPU if there are enough; otherwise they share, which tests dispatch but not speed. With
    ``sbs`` every server publishes the ends of its forward passes.
    """

    replicas: int = 2
    dispatch: str = DEFAULT_DISPATCH

    @contextmanager
    def started(
        self,
        policy: PolicySpec,
        device: Device,
        options: EngineOptions,
        progress: Callable[[Path], Callable[[float], None]],
    ) -> Iterator[StartedServers]:
        """The servers under the policy, behind the gateway; see :meth:`VllmEngine.started`."""
        refuse_api_server(options, self.name)
        logs = Path(tempfile.mkdtemp(prefix="ebbench-vllm-"))  # stays there when a run fails
        with tempfile.TemporaryDirectory(prefix="ebbench-record-") as folder, ExitStack() as stack:
            recorded = not policy.native or self.record_v1
            records = [Path(folder) / f"steps-{i}" if recorded else None for i in range(self.replicas)]
            servings = self._servings(policy, device, options, records)
            processes = self._start(servings, logs, stack)
            for process, record in zip(processes, records, strict=True):
                process.wait_ready(self.ready_timeout_s, progress(process.log))
                if record is not None:
                    prove_policy(record, policy, process)
            gateway = stack.enter_context(GatewayProcess(self._gateway(servings, options)))
            servers = StartedServers(
                client=self.client_for(servings[0].model),
                on_batch=self.on_batch,
                log=self.log,
                url=gateway.url,
                servings=servings,
                processes=processes,
                vllm_options=self.vllm_options,
                further_facts={"replicas": self.replicas, "dispatch": self.dispatch},
            )
            yield servers
        if servers.log_kept.is_set():
            shutil.rmtree(logs)

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
