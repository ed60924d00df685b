"""The processors of a validation on vLLM's CPU build: one for the client, the others for vLLM.

The engine core of the CPU build polls without sleeping, beside the threads of the model. On two processors a client
that shares both with them wakes up to a second late, and its runs are INVALID. Calibration and servers start on the
same processors, so that predicted and measured steps have the same. On a GPU nothing is changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ebbench.engines.vllm_command import cpu_build
from ebbench.validation.question import ValidationQuestion


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
