"""The ``vllm`` engine: starts vLLM servers with the policy, sends plans, stops them, and reads their records."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ebbench.client import DriveResult
from ebbench.client.load_generator import drive
from ebbench.config.topology import DEFAULT_DISPATCH
from ebbench.devices.base import Device
from ebbench.engines.base import EngineResult, refuse_simulated
from ebbench.engines.endpoint import SendingEngine, warmed
from ebbench.engines.machine import visible_gpus
from ebbench.engines.vllm_command import (
    Emulation,
    Serving,
    check_servable,
    cpu_build,
    executable_line,
    hub_name,
    import_path,
    model_config,
    model_folder,
    plain_line,
    position_limit,
)
from ebbench.engines.vllm_server import ServerProcess, free_port
from ebbench.errors import DataError, RunError, UsageError
from ebbench.gateway.process import GatewayProcess
from ebbench.gateway.settings import GatewaySettings
from ebbench.process.termination import interruptible
from ebbench.records.plan import Observer, Plan, Progress
from ebbench.records.schema import DECISIONS, STEPS, decisions_table, with_columns
from ebbench.records.warnings import RunWarning, warning
from ebbench.spec.client import ClientOptions
from ebbench.spec.server import EngineOptions
from vllm_eb.calibration import Calibration
from vllm_eb.policy import PolicySpec
from vllm_eb.reports import FLUSH_EVERY_S, read_frames

# vLLM servers that have been started for one policy, the runs made on them, and the steps that they recorded.

_STEP_FIELDS = (
    "step_id", "scheduled_ns", "start_ns", "end_ns", "mode", "prefill_tokens", "decode_seqs", "request_ids",
    "request_tokens", "kv_blocks_used", "waiting", "running", "preempted_ids", "k", "n_limit",
)  # fmt: skip
_WRAPPING = re.compile(r"^(?:chat)?cmpl-")


@dataclass(frozen=True)
class Recording:
    """Steps and decisions of one engine process; times in ns from the start of the run."""

    steps: pa.Table
    decisions: pa.Table


def read_recording(folder: Path, name_of: Callable[[str], str], start_ns: int, since_ns: int = 0) -> Recording:
    """Read all shards of a record directory. ``name_of`` maps vLLM's request ids to the plan's.

    What was scheduled before ``since_ns`` (monotonic time) is left out: earlier runs of the same server. Steps are
    numbered from 0. Raises DataError for a file that is none, or when there is nothing.
    """
    steps: list[dict[str, Any]] = []
    decisions: list[dict[str, Any]] = []
    shards = sorted(folder.glob("*.msgpack"))
    for path in shards:
        names: list[str] = []
        head: dict[str, Any] = {}
        try:
            frames = read_frames(path)
        except ValueError as error:
            raise DataError(str(error)) from None
        for kind, *values in frames:
            if kind == "head":
                head = values[0]
            elif kind == "ids":
                names += map(name_of, values[0])
            elif kind == "step" and values[1] >= since_ns:
                steps.append(_step_row(values, names, head, name_of, start_ns))
            elif kind == "decision" and values[0] >= since_ns:
                time_ns, step_id, what, reason, mode, phase, inputs = values
                row = {"time_ns": time_ns - start_ns, "step_id": step_id, "instance": 0, "kind": what}
                decisions.append(row | {"reason": reason, "mode": mode, "phase": phase} | inputs)
    if not shards:
        raise DataError(f"{folder} holds no records of the scheduler plugin")
    if since_ns and steps:
        first = min(row["step_id"] for row in steps)
        for row in (*steps, *decisions):
            row["step_id"] = max(row["step_id"] - first, 0)
    return Recording(steps=pa.Table.from_pylist(steps, schema=STEPS), decisions=decisions_table(decisions))


def _step_row(
    values: Sequence[Any], names: Sequence[str], head: dict[str, Any], name_of: Callable[[str], str], start_ns: int
) -> dict[str, Any]:
    row = dict(zip(_STEP_FIELDS, values, strict=True))
    row["request_ids"] = [names[number] for number in row["request_ids"]]
    row["request_tokens"] = row["request_tokens"] or [1] * len(row["request_ids"])
    row["preempted_ids"] = [name_of(name) for name in row["preempted_ids"]]
    for name in ("scheduled_ns", "start_ns", "end_ns"):
        row[name] -= start_ns
    decodes, prefills = row["decode_seqs"], row["prefill_tokens"]
    row["phase"] = "prefill" if not decodes else "mixed" if prefills else "decode"
    return row | {
        "instance": 0,
        "kv_blocks_total": head["kv_blocks_total"],
        "preemptions": len(row["preempted_ids"]),
    }


def planned_name(prefix: str, planned: Iterable[str]) -> Callable[[str], str]:
    """A function that removes what client and server add to a planned id: ``cmpl-<prefix><id>-0-<random>``.

    Ids that are not in the plan (warm-up) are returned unchanged.
    """
    known = set(planned)

    def name_of(wrapped: str) -> str:
        rest = _WRAPPING.sub("", wrapped).removeprefix(prefix)
        while rest not in known:
            rest, dash, _ = rest.rpartition("-")
            if not dash:
                return wrapped
        return rest

    return name_of


def joined_requests(requests: pa.Table, steps: pa.Table) -> pa.Table:
    """The requests table with what only the scheduler knows: first scheduling time and preemptions."""
    times = steps["scheduled_ns"].take(pc.list_parent_indices(steps["request_ids"]))
    scheduled = pa.table({"name": pc.list_flatten(steps["request_ids"]), "time_ns": times})
    earliest = scheduled.group_by("name").aggregate([("time_ns", "min")])
    first = dict(zip(earliest["name"].to_pylist(), earliest["time_ns_min"].to_pylist(), strict=True))
    preempted = Counter(pc.list_flatten(steps["preempted_ids"]).to_pylist())
    names = requests["request_id"].to_pylist()
    columns = {
        "scheduled_ns": [first.get(name) for name in names],
        "preemptions": [preempted[name] if name in first else None for name in names],
    }
    return with_columns(requests, columns)


DEATH_S = 10.0  # longest time from the first failed request to the end of a server that died
RECORD_WAIT_S = 15.0


@dataclass
class StartedServers(SendingEngine):
    """The engine of servers that run already: plans one after the other under the policy they were started with.

    What a policy has learnt from one plan it knows in the next, as in any server. ``url``: where requests are sent, the
    only server or the gateway in front of several. ``servings`` and ``processes``: one of each per server. ``log``:
    where the servers' output so far is copied after each run. ``further_facts``: entries for the manifest.
    """

    url: str
    servings: Sequence[Serving]
    processes: Sequence[ServerProcess]
    vllm_options: tuple[str, ...] = ()
    further_facts: Mapping[str, object] = field(default_factory=dict)
    log_kept: threading.Event = field(default_factory=threading.Event)  # shared by the copies for single runs
    name: str = "vllm"

    def run(
        self, plan: Plan, policy: PolicySpec, device: Device, options: EngineOptions, observer: Observer | None = None
    ) -> EngineResult:
        """Run to the end of the plan. Raises UsageError for another policy, RunError when a server dies."""
        first = self.servings[0]
        if policy != first.policy:
            raise UsageError(f"the server schedules by {first.policy.name}, not by {policy.name}")
        records, since_ns = [serving.record for serving in self.servings], time.monotonic_ns()
        try:
            client = warmed(self.client, options)
            done = drive(self.url, plan, client, observer, self.on_batch, label=policy.name)
        except RunError:
            for process in self.processes:
                process.check_alive("died")
            raise
        for process in self.processes:
            process.kept_log = self.log  # the folder of temporary logs is removed once they are copied
        died = tuple(reason for process in self.processes for reason in reason_of_death(process, done))
        if not died:
            await_records(records)
        recordings = [recording_of(record, plan, done, since_ns) for record in records]
        facts = {**self.further_facts, **server_facts(first, self.vllm_options, self._keep_logs())}
        return engine_result(
            done, merged([recording for recording in recordings if recording is not None]), facts, died
        )

    def _keep_logs(self) -> Path:
        """Where the servers' output is: copied to ``log`` if that was asked for, several joined in one file."""
        logs = [process.log for process in self.processes]
        if self.log is None:
            return logs[0] if len(logs) == 1 else logs[0].parent
        try:
            if len(logs) == 1:
                shutil.copy(logs[0], self.log)
            else:
                self.log.write_bytes(b"".join(f"== {path.name}\n".encode() + path.read_bytes() for path in logs))
        except OSError:  # the disk is full, the directory gone: no reason to lose the run
            return logs[0].parent
        self.log_kept.set()
        return self.log


def server_facts(serving: Serving, vllm_options: Sequence[str], log: Path) -> dict[str, object]:
    """How a server was started, for the manifest."""
    options = {"vllm_options": list(vllm_options)} if vllm_options else {}
    return {"server_command": plain_line(serving), "server_log": str(log), **options}


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


def reason_of_death(server: ServerProcess, done: DriveResult) -> tuple[RunWarning, ...]:
    """Why the run is INVALID if the server ended by itself.

    Requests fail before the server's process is seen to have ended: its supervisor first ends the processes that the
    server started.
    """
    failed = pc.any(pc.equal(done.requests["status"], "failed")).as_py()
    try:
        server.check_alive("died during the run", DEATH_S if failed else 0.0)
    except RunError as error:
        return (warning("server-died", error=str(error)),)
    return ()


def recording_of(record: Path | None, plan: Plan, done: DriveResult, since_ns: int = 0) -> Recording | None:
    """What the scheduler recorded in the folder, in the run's time and names; None where it did not.

    ``since_ns``: monotonic time before which steps belong to earlier runs.
    """
    if record is None:
        return None
    names = planned_name(str(done.facts["request_id_prefix"]), plan.table["request_id"].to_pylist())
    try:
        return read_recording(record, names, int(done.facts["start_monotonic_ns"]), since_ns)
    except DataError as error:
        raise RunError(str(error)) from None


def engine_result(
    done: DriveResult, recording: Recording | None, facts: Mapping[str, object], died: tuple[RunWarning, ...]
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


def merged(recordings: Sequence[Recording]) -> Recording | None:
    """Recordings of several servers as one: instances numbered, steps in scheduling order."""
    if len(recordings) < 2:
        return recordings[0] if recordings else None

    def together(tables: Iterable[pa.Table], *order: str) -> pa.Table:
        numbered = [
            with_columns(table, {"instance": np.full(len(table), i, np.int32)}) for i, table in enumerate(tables)
        ]
        whole = pa.concat_tables(numbered, promote_options="default")
        return whole.take(pc.sort_indices(whole, sort_keys=[(name, "ascending") for name in order]))

    steps = together((r.steps for r in recordings), "scheduled_ns", "instance")
    return Recording(
        steps=with_columns(steps, {"step_id": np.arange(len(steps), dtype=np.int64)}),
        decisions=together((r.decisions for r in recordings), "time_ns"),
    )


READY_TIMEOUT_S = 900.0
# A CPU run checks correctness; compilation would take longer than the run.
CPU_ARGUMENTS = ("--enforce-eager",)
CPU_KV_SHARE = 4  # the KV cache gets this fraction (1 / N) of the free memory, in whole GiB
PROOF_TIMEOUT_S = 10.0


@dataclass
class VllmEngine(SendingEngine):
    """Starts one server per run, or ``replicas`` equal ones behind a gateway with dispatch policy ``dispatch``.

    ``model``: name or folder to serve; None: the device's model. With dispatch ``sbs`` every server publishes the ends
    of its forward passes. Servers that share a GPU test dispatch but not speed.

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
    replicas: int | None = None
    dispatch: str = DEFAULT_DISPATCH
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
        refuse_simulated(vars(options), self.name)
        logs = Path(tempfile.mkdtemp(prefix="ebbench-vllm-"))  # stays there when a run fails
        with tempfile.TemporaryDirectory(prefix="ebbench-record-") as folder, ExitStack() as stack:
            servings = self._servings(policy, device, options, Path(folder))
            with interruptible():  # a server may take minutes to start, and nothing has been measured yet
                processes = [stack.enter_context(process) for process in self._processes(servings, logs)]
                for serving, process in zip(servings, processes, strict=True):
                    process.wait_ready(self.ready_timeout_s, progress(process.log))
                    if serving.record is not None:
                        prove_policy(serving.record, policy, process)
            url, facts = servings[0].url, dict[str, object]()
            if self.replicas is not None:
                url = stack.enter_context(GatewayProcess(self._gateway(servings, options))).url
                facts = {"replicas": self.replicas, "dispatch": self.dispatch}
            servers = StartedServers(
                client=self.client_for(servings[0].model),
                on_batch=self.on_batch,
                log=self.log,
                url=url,
                servings=servings,
                processes=processes,
                vllm_options=self.vllm_options,
                further_facts=facts,
            )
            yield servers
        if servers.log_kept.is_set():
            shutil.rmtree(logs)

    def _servings(self, policy: PolicySpec, device: Device, options: EngineOptions, folder: Path) -> list[Serving]:
        """The settings of every server. Records go to ``folder``; vLLM unchanged has none."""
        calibration, recorded = known_costs(device), not policy.native or self.record_v1
        signalled = self.replicas is not None and self.dispatch.partition(":")[0] == "sbs"
        servings = []
        for index in range(self.replicas or 1):
            record = folder / f"steps-{index}" if recorded else None
            serving = self.serving(policy, calibration, options, record, device.model)
            endpoint = f"tcp://127.0.0.1:{free_port()}" if signalled else None
            servings.append(replace(serving, signals=endpoint))
        if len({s.port for s in servings} | {s.signals for s in servings if s.signals}) < len(servings):
            raise UsageError("could not find free ports for the servers; try again")
        return servings

    def _processes(self, servings: Sequence[Serving], logs: Path) -> Iterator[ServerProcess]:
        """Each of several servers gets its own GPU if there are enough; otherwise they share."""
        several = len(servings) > 1
        own_gpus = several and len(visible_gpus()) >= len(servings) and "CUDA_VISIBLE_DEVICES" not in os.environ
        for index, serving in enumerate(servings):
            log = logs / (f"server-{index}.log" if several else "server.log")
            environment = server_environment(serving.policy)
            if own_gpus:
                environment["CUDA_VISIBLE_DEVICES"] = str(index)
            yield ServerProcess(executable_line(serving), serving.url, log, environment)

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
        cpu = CPU_ARGUMENTS if cpu_build() and not options.enforce_eager else ()
        return Serving(
            model=str(folder) if folder else model,
            policy=policy,
            calibration=calibration,
            port=free_port(),
            record=record,
            options=options,
            max_model_len=min(options.max_model_len, limit) if limit else options.max_model_len,
            emulation=self.emulation,
            extra=("--uvicorn-log-level", "warning", *cpu, *self.vllm_options),
        )

    def client_for(self, model: str) -> ClientOptions:
        """The load generator's options, its token ids within the model's vocabulary; an emulated GPU has no power."""
        client = self.client if self.emulation is None else replace(self.client, power=False)
        folder = model_folder(model)
        vocabulary = model_config(folder).get("vocab_size") if folder else None
        if isinstance(vocabulary, int):
            return replace(client, vocab_size=min(client.vocab_size, vocabulary))
        return client


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
