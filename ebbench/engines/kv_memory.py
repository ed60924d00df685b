"""What to do when vLLM ends at its start for lack of memory, from what it prints."""

from __future__ import annotations

import math
import re

_CACHE_TOO_SMALL = re.compile(
    r"max seq len \((?P<tokens>\d+)\), \(?(?P<needed>[\d.]+) GiB KV cache is needed, which is larger than the "
    r"available KV cache memory \((?P<given>[\d.]+) GiB\)(?:.{0,60}estimated maximum model length is (?P<most>\d+))?"
)
_NO_CACHE = "No available memory for the cache blocks"
_NOT_FREE = re.compile(
    r"Available memory on node \d+ \((?P<free>[\d.]+)/[\d.]+ GiB\) on (?:startup|kv cache allocation) is less than"
)
_MORE = "VLLM_CPU_KVCACHE_SPACE={gib} (GiB, in the environment) on a CPU, --gpu-memory-utilization SHARE on a GPU"


def memory_remedy(output: str) -> str | None:
    """What lacks memory and what to do, in one line; None if ``output`` does not say that any is missing.

    ``output``: what vLLM (0.32) printed, or the end of it.
    """
    if found := _CACHE_TOO_SMALL.search(output):
        most = f" of at most {found['most']}" if found["most"] else ""
        more = _MORE.format(gib=max(math.ceil(float(found["needed"])), 1))
        return (
            f"the KV cache has {found['given']} GiB, and one request of {found['tokens']} tokens needs "
            f"{found['needed']} GiB: pass --max-model-len TOKENS{most} to vLLM, or give the cache more: {more}"
        )
    if _NO_CACHE in output:
        return f"no memory is left for the KV cache: give it some: {_MORE.format(gib='4')}"
    if found := _NOT_FREE.search(output):
        size = max(int(float(found["free"]) / 2), 1)
        return (
            f"vLLM asks for more memory than the {found['free']} GiB that are free: set the size of the KV cache with "
            f"VLLM_CPU_KVCACHE_SPACE={size} (GiB, in the environment), or end other processes"
        )
    return None
