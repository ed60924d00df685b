"""The ``vllm`` engine: starts a vLLM server with the policy, sends the plan, stops it, and reads its records."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow.compute as pc

from ebbench.client import ClientOptions, DriveResult
from ebbench.devices.base import Device
from ebbench.engines.base import EngineOptions, EngineResult, Observer, Progress
from ebbench.engines.endpoint import SendingEngine, drive, warmed
from ebbench.engines.recorded import Recording, joined_requests, planned_name, read_recording
from ebbench.engines.vllm_command import (
    Emulation,
    Serving,
    cpu_build,
    executable_line,
    hub_name,
    plain_line,
    plugin_roots,
)
from ebbench.engines.vllm_server import ServerProcess, free_port
from ebbench.errors import DataError, RunError
from ebbench.records.plan import Plan
from ebbench.records.schema import DECISIONS, STEPS
from vllm_eb.calibration import Calibration
from vllm_eb.policy import PolicySpec
from vllm_eb.recorder import FLUSH_EVERY_S, read_frames

READY_TIMEOUT_S = 900.0
# A CPU run checks correctness; compilation would take longer than the run.
CPU_ARGUMENTS = ("--enforce-eager",)
CPU_KV_SHARE = 4  # the KV cache gets this fraction (1 / N) of the free memory, in whole GiB
PROOF_TIMEOUT_S = 10.0
DEATH_S = 10.0  # longest time from the first failed request to the end of a server that died
RECORD_WAIT_S = 15.0


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
        log = Path(tempfile.mkdtemp(prefix="ebbench-vllm-")) / "server.log"  # kept if the run fails
        with tempfile.TemporaryDirectory(prefix="ebbench-record-") as folder:
            record = Path(folder) / "steps" if not policy.native or self.record_v1 else None
            serving = self.serving(policy, known_costs(device), options, record, device.model)
            url = f"http://{serving.host}:{serving.port}"
            with ServerProcess(executable_line(serving), url, log, server_environment()) as server:
                server.wait_ready(self.ready_timeout_s, startup_progress(observer, policy, plan, log))
                if record is not None:
                    prove_policy(record, policy, server)
                try:
                    client = warmed(self.client_for(serving.model), options)
                    done = drive(url, plan, client, observer, label=policy.name, on_batch=self.on_batch)
                except RunError:
                    server.check_alive("died")
                    raise
                died = reason_of_death(server, done)
                if not died:
                    await_records([record])
            recording = recording_of(record, plan, done)
        if self.log is not None:
            log = Path(shutil.move(log, self.log))
        return engine_result(done, recording, self.facts(serving, log), died)

    def facts(self, serving: Serving, log: Path) -> dict[str, object]:
        """How the server was started, for the manifest."""
        options = {"vllm_options": list(self.vllm_options)} if self.vllm_options else {}
        return {"server_command": plain_line(serving), "server_log": str(log), **options}

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
        folder = _model_folder(model)
        limit = _position_limit(folder)
        model = model if folder else hub_name(model)
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
        """The load generator's options, with token ids within the model's vocabulary."""
        folder = _model_folder(model)
        vocabulary = _config(folder).get("vocab_size") if folder else None
        if isinstance(vocabulary, int):
            return replace(self.client, vocab_size=min(self.client.vocab_size, vocabulary))
        return self.client


def _cpu_arguments(options: EngineOptions) -> tuple[str, ...]:
    return CPU_ARGUMENTS if cpu_build() and not options.enforce_eager else ()


def known_costs(device: Device) -> Calibration | None:
    """The costs that the controller uses; None if they were not measured.

    They are written into the server's command, so that the stored command works on any machine.
    """
    return device.calibration if device.costs_known else None


def _model_folder(model: str) -> Path | None:
    """The folder of a local model; the path of its config.json also names it."""
    path = Path(model)
    if path.name == "config.json" and path.is_file():
        return path.parent
    return path if path.is_dir() else None


def _config(folder: Path | None) -> Mapping[str, object]:
    path = folder / "config.json" if folder else None
    if path is None or not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{path} is not JSON ({error})") from None
    return found if isinstance(found, dict) else {}


def _position_limit(folder: Path | None) -> int | None:
    limit = _config(folder).get("max_position_embeddings")
    return limit if isinstance(limit, int) else None


def startup_progress(observer: Observer | None, policy: PolicySpec, plan: Plan, log: Path) -> Callable[[float], None]:
    """A callback that shows ``observer`` how long a server has been starting, and where its log is."""

    def tell(waited_s: float) -> None:
        if observer is not None:
            reason = f"the server to start, log {log}"
            observer.update(Progress(policy.name, 0, len(plan), 0, 0, waited_s, "", 0, 0, waiting_for=reason))

    return tell


def server_environment() -> dict[str, str]:
    """The user's environment without telemetry; ebbench and the plugin are importable in it."""
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([*plugin_roots(), *([inherited] if inherited else [])])
    ours = {"PYTHONPATH": path, "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if cpu_build():
        free_gib = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
        ours |= {
            "VLLM_CPU_KVCACHE_SPACE": str(max(1, free_gib // CPU_KV_SHARE)),
            # Reserve a core on which the model's threads do not busy-wait, so that the client can keep its schedule.
            "VLLM_CPU_NUM_OF_RESERVED_CPU": str(min(1, (os.cpu_count() or 1) - 1)),
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
                f"the server runs, but policy {policy.name} does not schedule it: the plugin wrote no record; "
                f"{server.tail()}"
            )
        time.sleep(0.1)


def await_records(records: Sequence[Path | None], longest_s: float = RECORD_WAIT_S) -> None:
    """Wait until records stop growing: a server that ends slowly may be killed with its last steps unwritten.

    An idle recorder writes its buffer within ``FLUSH_EVERY_S``.
    """
    deadline = time.monotonic() + longest_s
    before, quiet_since = -1, time.monotonic()
    while (now := time.monotonic()) < min(deadline, quiet_since + 3 * FLUSH_EVERY_S):
        size = sum(shard.stat().st_size for folder in records if folder is not None for shard in folder.glob("*"))
        if size != before:
            before, quiet_since = size, now
        time.sleep(FLUSH_EVERY_S / 5)


def _in_group(pid: int, group: int) -> bool:
    try:
        return os.getpgid(pid) == group
    except ProcessLookupError:
        return False


def reason_of_death(server: ServerProcess, done: DriveResult) -> tuple[str, ...]:
    """Why the run is INVALID if the server ended by itself.

    Requests fail before the server's process is seen to have ended: its supervisor first ends the processes that the
    server started.
    """
    failed = pc.any(pc.equal(done.requests["status"], "failed")).as_py()
    try:
        server.check_alive("died during the run", DEATH_S if failed else 0.0)
    except RunError as error:
        return (str(error),)
    return ()


def recording_of(record: Path | None, plan: Plan, done: DriveResult) -> Recording | None:
    """The scheduler's records in the run's time and names; None if it recorded nothing."""
    if record is None:
        return None
    names = planned_name(str(done.facts["request_id_prefix"]), plan.table["request_id"].to_pylist())
    try:
        return read_recording(record, names, int(done.facts["start_monotonic_ns"]))
    except DataError as error:
        raise RunError(str(error)) from None


def engine_result(
    done: DriveResult, recording: Recording | None, facts: Mapping[str, object], died: tuple[str, ...]
) -> EngineResult:
    """The client's measurements joined with the scheduler's records."""
    return EngineResult(
        requests=joined_requests(done.requests, recording.steps) if recording else done.requests,
        steps=recording.steps if recording else STEPS.empty_table(),
        decisions=recording.decisions if recording else DECISIONS.empty_table(),
        warnings=done.warnings,
        interrupted=done.interrupted,
        invalid=(*done.invalid, *died),
        facts={**done.facts, **facts},
        server_metrics=done.server_metrics,
    )
