"""A run made for its figures leaves no garbage, and does not search the objects of the program that asked for it."""

import gc
from collections import Counter
from collections.abc import Mapping

from ebbench.runs.execute import Task, make
from ebbench.spec.run import simulated


def test_only_the_objects_of_a_run_are_searched_for_garbage() -> None:
    """A program may hold millions, which a full collection visits: a second for each run beside vLLM's modules."""
    cell = simulated("balanced", "eb", "h200", "qwen3-8b", 16, 2048, num_prompts=40, max_concurrency=16)
    make(Task(cell))  # devices and plans are kept from here on
    gc.collect()
    collected: Counter[int] = Counter()

    def note(phase: str, info: Mapping[str, int]) -> None:
        if phase == "stop":
            collected[info["generation"]] += info["collected"]

    gc.callbacks.append(note)
    try:
        make(Task(cell))
    finally:
        gc.callbacks.remove(note)
    assert set(collected) == {0}
    assert collected[0] > 50, "a simulation's objects form cycles"
    assert gc.isenabled()
    assert not gc.collect()
