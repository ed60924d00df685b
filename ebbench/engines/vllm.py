"""The ``vllm`` engine: starts a vLLM server with the policy, sends the plan, stops it, and reads its records."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ebbench.devices.base import Device
from ebbench.engines.base import EngineResult, Observer, Progress
from ebbench.engines.checks import refuse_simulated
from ebbench.engines.endpoint import SendingEngine
from ebbench.engines.model_folder import check_servable, model_config, model_folder, position_limit
from ebbench.engines.started import StartedServers
from ebbench.engines.vllm_command import (
    Emulation,
    Serving,
    cpu_build,
    executable_line,
    hub_name,
    import_path,
)
from ebbench.engines.vllm_server import ServerProcess, free_port
from ebbench.errors import RunError
from ebbench.process.termination import interruptible
from ebbench.records.plan import Plan
from ebbench.spec.client import ClientOptions
from ebbench.spec.server import EngineOptions
from vllm_eb.calibration import Calibration
from vllm_eb.policy import PolicySpec
from vllm_eb.reports import read_frames

READY_TIMEOUT_S = 900.0
# A CPU run checks correctness; compilation would take longer than the run.
CPU_ARGUMENTS = ("--enforce-eager",)
CPU_KV_SHARE = 4  # the KV cache gets this fraction (1 / N) of the free memory, in whole GiB
PROOF_TIMEOUT_S = 10.0


@dataclass
class VllmEngine(SendingEngine):
    """Starts one server per run. ``model``: name or folder to serve; None: the device's model.

    ``vllm_options`` go to ``vllm serve`` unchanged and are part of what comparisons check. ``emulation`` gives the
    server an emulated device. ``record_v1`` runs v1 through the plugin as well, which then only records the steps;
    without it v1 is vLLM unchanged and has no steps. ``log``: where the server's output goes after the run; that of a
    failed server stays in the temporary folder that the error names.
    """

    model: str | None = None
    vllm_options: tuple[str, ...] = ()
    emulation: Emulation | None = None
    record_v1: bool = False
    ready_timeout_s: float = READY_TIMEOUT_S
    name: str = "vllm"

    def run(
        self, plan: Plan, policy: PolicySpec, device: Device, options: EngineOptions, observer: Observer | None = None
    ) -> EngineResult:
        """Run to the end of the plan.

        Raises UsageError for what cannot be served, RunError if the server does not start, dies, or is not scheduled by
        the plugin although it should be.
        """
        with self.started(policy, device, options, lambda log: startup_progress(observer, policy, plan, log)) as server:
            return server.run(plan, policy, device, options, observer)

    @contextmanager
    def started(
        self,
        policy: PolicySpec,
        device: Device,
        options: EngineOptions,
        progress: Callable[[Path], Callable[[float], None]],
    ) -> Iterator[StartedServers]:
        """Servers under the policy, ready for any number of plans; stopped at the end.

        ``progress`` gets the path of a server's log and returns what is called while the server starts. Raises as
        :meth:`run` does.
        """
        refuse_simulated(options, self.name)
        logs = Path(tempfile.mkdtemp(prefix="ebbench-vllm-"))  # stays there when a run fails
        with tempfile.TemporaryDirectory(prefix="ebbench-record-") as folder, ExitStack() as stack:
            servings = self._servings(policy, device, options, Path(folder))
            with interruptible():  # a server may take minutes to start, and nothing has been measured yet
                processes = [stack.enter_context(process) for process in self._processes(servings, logs)]
                for serving, process in zip(servings, processes, strict=True):
                    process.wait_ready(self.ready_timeout_s, progress(process.log))
                    if serving.record is not None:
                        prove_policy(serving.record, policy, process)
            servers = StartedServers(
                client=self.client_for(servings[0].model),
                on_batch=self.on_batch,
                log=self.log,
                url=self._front(servings, options, stack),
                servings=servings,
                processes=processes,
                vllm_options=self.vllm_options,
                further_facts=self._further_facts(),
            )
            yield servers
        if servers.log_kept.is_set():
            shutil.rmtree(logs)

    def _servings(self, policy: PolicySpec, device: Device, options: EngineOptions, folder: Path) -> list[Serving]:
        """The settings of every server. Records go to ``folder``."""
        return [
            self.serving(policy, known_costs(device), options, self._record(policy, folder / "steps"), device.model)
        ]

    def _record(self, policy: PolicySpec, folder: Path) -> Path | None:
        """Where the plugin records the steps; None for vLLM unchanged."""
        return folder if not policy.native or self.record_v1 else None

    def _processes(self, servings: Sequence[Serving], logs: Path) -> Iterator[ServerProcess]:
        for index, serving in enumerate(servings):
            log = logs / ("server.log" if len(servings) == 1 else f"server-{index}.log")
            environment = server_environment(serving.policy) | self._gpu(index, len(servings))
            yield ServerProcess(executable_line(serving), serving.url, log, environment)

    def _gpu(self, index: int, servers: int) -> dict[str, str]:
        """The environment that gives server ``index`` of ``servers`` its GPU; empty: all of them."""
        return {}

    def _front(self, servings: Sequence[Serving], options: EngineOptions, stack: ExitStack) -> str:
        """Where requests are sent: to the server, or to what ``stack`` then holds in front of several."""
        return servings[0].url

    def _further_facts(self) -> dict[str, object]:
        """Entries of the manifest."""
        return {}

    def serving(
        self,
        policy: PolicySpec,
        calibration: Calibration | None,
        options: EngineOptions,
        record: Path | None,
        device_model: str,
    ) -> Serving:
        """The settings of the server."""
        model = self.model or device_model
        folder = model_folder(model)
        limit = position_limit(folder)
        model = model if folder else hub_name(model)
        if self.emulation is None:
            check_servable(model, self.vllm_options)
        return Serving(
            model=str(folder) if folder else model,
            policy=policy,
            calibration=calibration,
            port=free_port(),
            record=record,
            options=options,
            max_model_len=min(options.max_model_len, limit) if limit else options.max_model_len,
            emulation=self.emulation,
            extra=("--uvicorn-log-level", "warning", *_cpu_arguments(options), *self.vllm_options),
        )

    def client_for(self, model: str) -> ClientOptions:
        """The load generator's options, its token ids within the model's vocabulary; an emulated GPU has no power."""
        client = self.client if self.emulation is None else replace(self.client, power=False)
        folder = model_folder(model)
        vocabulary = model_config(folder).get("vocab_size") if folder else None
        if isinstance(vocabulary, int):
            return replace(client, vocab_size=min(client.vocab_size, vocabulary))
        return client


def _cpu_arguments(options: EngineOptions) -> tuple[str, ...]:
    return CPU_ARGUMENTS if cpu_build() and not options.enforce_eager else ()


def known_costs(device: Device) -> Calibration | None:
    """The costs that the controller uses; None if they were not measured.

    They are written into the server's command, so that the stored command works on any machine.
    """
    return device.calibration if device.costs_known else None


def startup_progress(observer: Observer | None, policy: PolicySpec, plan: Plan, log: Path) -> Callable[[float], None]:
    """A callback that shows ``observer`` how long a server has been starting, and where its log is."""

    def tell(waited_s: float) -> None:
        if observer is not None:
            reason = f"the server to start, log {log}"
            observer.update(Progress(policy.name, 0, len(plan), 0, 0, waited_s, "", 0, 0, waiting_for=reason))

    return tell


def server_environment(policy: PolicySpec | None = None) -> dict[str, str]:
    """The user's environment without telemetry; ebbench, the plugin and ``policy`` are importable in it."""
    ours = {"PYTHONPATH": import_path(policy), "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if cpu_build():
        free_gib = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
        ours |= {
            "VLLM_CPU_KVCACHE_SPACE": str(max(1, free_gib // CPU_KV_SHARE)),
            # Reserve a core on which the model's threads do not busy-wait, so that the client can keep its schedule.
            "VLLM_CPU_NUM_OF_RESERVED_CPU": str(min(1, len(os.sched_getaffinity(0)) - 1)),
        }
        ours |= {name: os.environ[name] for name in ours if name.startswith("VLLM_CPU_") and name in os.environ}
    return dict(os.environ) | ours


def prove_policy(record: Path, policy: PolicySpec, server: ServerProcess) -> None:
    """Raise RunError unless the policy schedules the server.

    The scheduler itself writes the first frame of the record, inside the engine process of this server.
    """
    deadline = time.monotonic() + PROOF_TIMEOUT_S
    while True:
        shards = sorted(record.glob("*.msgpack"))
        if shards:
            try:
                head = read_frames(shards[0])[0][1]
            except ValueError:
                head = {}
            if head.get("policy") == policy.name and _in_group(int(head["pid"]), server.group):
                return
        if time.monotonic() > deadline:
            raise RunError(
                f"the server runs, but policy {policy.name} does not schedule it: the plugin wrote no record"
                f"{server.reason()}"
            )
        time.sleep(0.1)


def _in_group(pid: int, group: int) -> bool:
    try:
        return os.getpgid(pid) == group
    except ProcessLookupError:
        return False
