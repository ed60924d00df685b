"""The ``vllm`` engine with several servers behind the gateway."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from ebbench.devices.base import Device
from ebbench.dispatch import DEFAULT_DISPATCH
from ebbench.engines.machine import visible_gpus
from ebbench.engines.vllm import VllmEngine, known_costs
from ebbench.engines.vllm_command import Serving
from ebbench.engines.vllm_server import free_port
from ebbench.errors import UsageError
from ebbench.gateway.process import GatewayProcess
from ebbench.gateway.settings import GatewaySettings
from ebbench.spec.client import ClientOptions
from ebbench.spec.server import EngineOptions
from vllm_eb.policy import PolicySpec


@dataclass
class ReplicatedVllmEngine(VllmEngine):
    """``replicas`` equal servers behind a gateway with dispatch policy ``dispatch``.

    Each server gets its own GPU if there are enough; otherwise they share, which tests dispatch but not speed. With
    ``sbs`` every server publishes the ends of its forward passes.
    """

    replicas: int = 2
    dispatch: str = DEFAULT_DISPATCH

    def _servings(self, policy: PolicySpec, device: Device, options: EngineOptions, folder: Path) -> list[Serving]:
        calibration = known_costs(device)
        signalled = self.dispatch.partition(":")[0] == "sbs"
        servings = []
        for index in range(self.replicas):
            record = self._record(policy, folder / f"steps-{index}")
            serving = self.serving(policy, calibration, options, record, device.model)
            endpoint = f"tcp://127.0.0.1:{free_port()}" if signalled else None
            servings.append(replace(serving, signals=endpoint))
        if len({s.port for s in servings} | {s.signals for s in servings if s.signals}) < self.replicas:
            raise UsageError("could not find free ports for the servers; try again")
        return servings

    def _gpu(self, index: int, servers: int) -> dict[str, str]:
        enough = len(visible_gpus()) >= servers and "CUDA_VISIBLE_DEVICES" not in os.environ
        return {"CUDA_VISIBLE_DEVICES": str(index)} if enough else {}

    def _front(self, servings: Sequence[Serving], options: EngineOptions, stack: ExitStack) -> str:
        return stack.enter_context(GatewayProcess(self._gateway(servings, options))).url

    def _further_facts(self) -> dict[str, object]:
        return {"replicas": self.replicas, "dispatch": self.dispatch}

    def _gateway(self, servings: Sequence[Serving], options: EngineOptions) -> GatewaySettings:
        return GatewaySettings(
            upstreams=tuple(serving.url for serving in servings),
            dispatch=self.dispatch,
            port=0,
            signals=tuple(s.signals for s in servings if s.signals is not None),
            chunk_tokens=options.max_num_batched_tokens,
            drain_s=5.0,
            max_wait_s=ClientOptions.total_timeout_s,  # the load generator's own limits decide
        )
