"""The garbage collector, kept out of the middle of measurements."""

from __future__ import annotations

import gc

_NEVER = 1 << 30


def no_full_collections() -> None:
    """Collect now; afterwards look at young objects only.

    A full collection looks at every object: with the records of some hundred requests it stops a process for 5 to 15
    ms, which was all of a client's TTFT error beyond the 99th percentile. What is alive now is left out altogether.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)
