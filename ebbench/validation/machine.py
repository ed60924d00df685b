"""The manifest of a validation: the machine, and every call of the command."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ebbench.engines.machine import engine_versions, machine_name, visible_gpus
from ebbench.engines.vllm_command import cpu_build
from ebbench.errors import DataError
from ebbench.process.child import environment
from ebbench.records import files
from ebbench.records.manifest import git_commit, software_versions, wall_clock_ns
from ebbench.validation.question import ValidationQuestion

# How vLLM's CPU build serves in a validation: on which processors, in which processes, and how the model is run.
#
# The CPU build polls without sleeping, beside the threads of the model. On two processors a client that shares both
# with them wakes up to a second late, and its runs are INVALID: so the client gets one, vLLM the others.
#
# Steps are measured in one process, without torch.compile. A server would compile the model and run it in a process
# beside the engine core, and the two, both polling, would take the same processors from each other: steps would be
# longer than the measured ones by an amount that differs from start to start. So servers run as the steps were
# measured: the model in the engine core's process, where one GPU's model runs as well, and eager. The API server,
# which takes 0.14 ms of a processor per token, shares the client's. On a GPU nothing is changed.

ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""The environment in which vLLM's CPU build keeps the model in the engine core's process."""


def server_processors(question: ValidationQuestion) -> frozenset[int]:
    """Numbers of the processors that vLLM gets; empty: no choice is made.

    That is so on a GPU, without vLLM, and where this process may use one processor only.
    """
    usable = os.sched_getaffinity(0)
    if not (question.real and cpu_build()) or len(usable) < 2:
        return frozenset()
    return frozenset(usable) - {min(usable)}


@contextmanager
def starting_on(processors: frozenset[int]) -> Iterator[None]:
    """What this thread starts inside runs on these processors; on all usable ones if the set is empty."""
    if not processors:
        yield
        return
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, usable)


@contextmanager
def starting_as_measured(question: ValidationQuestion) -> Iterator[None]:
    """Servers started inside run on :func:`server_processors`, the CPU build's model in the engine core's process."""
    variables = ONE_PROCESS if question.real and cpu_build() else {}
    with environment(**variables), starting_on(server_processors(question)):
        yield


def move_beside_the_client(supervisors: Iterable[int], processors: frozenset[int]) -> None:
    """Move running API servers to the usable processors outside ``processors``; engine cores stay where they are.

    ``supervisors``: process ids whose child is an API server; the engine core is the API server's child.
    """
    others = os.sched_getaffinity(0) - processors
    if not processors or not others:
        return
    for supervisor in supervisors:
        for server in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split():
            for thread in Path(f"/proc/{server}/task").iterdir():
                with suppress(ProcessLookupError):  # threads that have just ended
                    os.sched_setaffinity(int(thread.name), others)


MANIFEST = "manifest.json"


@dataclass
class Call:
    """One call of the command. ``load_average``: one-minute averages sampled during it; above the number of CPUs, other
    processes were running."""

    arguments: list[str]
    began_unix_ns: int
    ended_unix_ns: int = 0
    load_average: list[float] = field(default_factory=list)

    def sample(self) -> None:
        """Record the machine's load average."""
        self.load_average.append(round(os.getloadavg()[0], 2))

    def end(self) -> None:
        """Record the end of the call."""
        self.sample()
        self.ended_unix_ns = wall_clock_ns()

    def to_dict(self) -> dict[str, Any]:
        """The call as a JSON object, times in UTC."""
        moments = (datetime.fromtimestamp(ns / 1e9, UTC) for ns in (self.began_unix_ns, self.ended_unix_ns))
        began, ended = (f"{moment:%Y-%m-%dT%H:%M:%SZ}" for moment in moments)
        return {"arguments": self.arguments, "began": began, "ended": ended, "load_average": self.load_average}


def describe_machine(question: ValidationQuestion) -> dict[str, Any]:
    """Hardware and software of a measurement."""
    real = question.real
    gpus = visible_gpus() if real else ()
    return {
        "name": machine_name() if real else f"{question.spec.device} ({question.spec.engine})",
        "gpus": [asdict(gpu) for gpu in gpus],
        "cpus": os.cpu_count(),
        "usable_cpus": len(os.sched_getaffinity(0)),
        "cpu_build": real and cpu_build(),
        "server_cpus": len(server_processors(question) or os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "versions": software_versions(engine_versions(question.spec.engine)),
    }


def write_manifest(folder: Path, question: ValidationQuestion, call: Call) -> list[float]:
    """Write the manifest, or add the call to an existing one; returns the load averages of all calls.

    Raises DataError for a damaged manifest.
    """
    path = folder / MANIFEST
    try:
        earlier = files.read_stored_json(path)["calls"] if path.exists() else []
        loads = [sample for call_before in earlier for sample in call_before["load_average"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: damaged ({error}); delete it") from None
    content = {
        "question": question.stored,
        "machine": describe_machine(question),
        "git_commit": git_commit(),
        "calls": [*earlier, call.to_dict()],
    }
    files.write_bytes(json.dumps(content, indent=1).encode() + b"\n", path)
    return [*loads, *call.load_average]
