"""How vLLM's CPU build serves in a validation: on which processors, in which processes, and how the model is run.

The CPU build polls without sleeping, beside the threads of the model. On two processors a client that shares both with
them wakes up to a second late, and its runs are INVALID: so the client gets one, vLLM the others.

Steps are measured in one process, without torch.compile. A server would compile the model and run it in a process
beside the engine core, and the two, both polling, would take the same processors from each other: steps would be longer
than the measured ones by an amount that differs from start to start. So servers run as the steps were measured: the
model in the engine core's process, where one GPU's model runs as well, and eager. The API server, which takes 0.14 ms
of a processor per token, shares the client's. On a GPU nothing is changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ebbench.engines.vllm_command import cpu_build
from ebbench.process.child import environment
from ebbench.validation.question import ValidationQuestion

ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""The environment in which vLLM's CPU build keeps the model in the engine core's process."""


def server_processors(question: ValidationQuestion) -> frozenset[int]:
    """Numbers of the processors that vLLM gets; empty: no choice is made.

    That is so on a GPU, without vLLM, and where this process may use one processor only.
    """
    usable = os.sched_getaffinity(0)
    if question.engine != "vllm" or not cpu_build() or len(usable) < 2:
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
    variables = ONE_PROCESS if question.engine == "vllm" and cpu_build() else {}
    with environment(**variables), starting_on(server_processors(question)):
        yield


def move_api_servers(supervisors: Iterable[int], processors: frozenset[int]) -> None:
    """Move running API servers to the usable processors outside ``processors``; engine cores stay where they are.

    ``supervisors``: process ids whose child is an API server; the engine core is the API server's child.
    """
    others = os.sched_getaffinity(0) - processors
    if not processors or not others:
        return
    for supervisor in supervisors:
        for api_server in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split():
            for thread in Path(f"/proc/{api_server}/task").iterdir():
                with suppress(ProcessLookupError):  # threads that have just ended
                    os.sched_setaffinity(int(thread.name), others)
