"""What vLLM takes from the memory of a GPU at its start, before the KV cache, by version.

The rules were read in vLLM's source code, the sizes are from its logs: reports/fidelity/notes/kv-cache.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ebbench.config.defaults import DEFAULT_VLLM
from ebbench.errors import UsageError

NEWEST = (0, 33)


@dataclass(frozen=True)
class Trial:
    """What a model runner takes for its trial run.

    ``logit_bytes``: per logit of the ``max_num_seqs`` sequences that it samples. ``graph_bytes``: what it reckons for
    CUDA graphs; 0: they are taken from what the KV cache leaves. ``heads``: how often it holds the language head
    beside the weights. ``at_once``: the step's memory is still held when its sequences are sampled.
    """

    logit_bytes: float
    graph_bytes: float = 0.0
    heads: int = 0
    at_once: bool = False


SORTS, FUSED, FILTERS = Trial(38.3), Trial(10.0), Trial(14.0)
"""The first runner: top-k and top-p by sorting; by FlashInfer; by a kernel that filters in place."""
FILTERS_GRAPHS = Trial(14.0, 0.4e9)
SECOND, SECOND_GRAPHS, SECOND_FULL = Trial(2.0, heads=1), Trial(2.0, 0.53e9, 1), Trial(9.0, 0.53e9, 1)
"""The second runner draws from the 16-bit logits; it filters in its trial run, too, from 0.33 on. Its logs show memory
of the size of the language head; what for is not known."""


@dataclass(frozen=True)
class StartUp:
    """The rules of the versions from ``since`` on.

    ``gpu_memory_utilization``: vLLM's default. ``dense``, ``experts``: the trial run of dense models and of mixtures of
    experts.
    """

    since: tuple[int, int]
    gpu_memory_utilization: float
    dense: Trial
    experts: Trial


STARTS = (
    # With FlashInfer, as in the official images; without it as in 0.11. Of 0.8 the last, 0.8.5, was read.
    StartUp((0, 8), 0.90, FUSED, FUSED),
    StartUp((0, 11), 0.90, SORTS, SORTS),
    StartUp((0, 17), 0.90, FILTERS, FILTERS),
    StartUp((0, 20), 0.92, FILTERS_GRAPHS, FILTERS_GRAPHS),
    StartUp((0, 25), 0.92, SECOND, FILTERS_GRAPHS),
    StartUp((0, 29), 0.92, SECOND_GRAPHS, SECOND_GRAPHS),
    StartUp((0, 33), 0.92, SECOND_FULL, SECOND_FULL),
)

EB_VLLM = "eb-vllm"
"""The build of Zhang et al. (ICML 2026), of which no log is published. Their printed rates and TPOT give the size of
its KV cache (448,000 tokens behind table 3 on the RTX PRO 6000, within 2 % on the H200), and that size these constants:
5 % less KV cache than vLLM 0.11 would have."""
_INFERRED = Trial(45.0, 0.31e9, at_once=True)
_OF_EB_VLLM = StartUp((0, 0), 0.90, _INFERRED, _INFERRED)


def release_of(version: str) -> tuple[int, int] | None:
    """Major and minor number of a version such as ``0.32`` or ``0.25.1``; None for another text."""
    found = re.fullmatch(r"(\d+)\.(\d+)(?:\.\w+)*", version)
    return None if found is None else (int(found[1]), int(found[2]))


def start_up(version: str = DEFAULT_VLLM) -> StartUp:
    """The rules of a version such as ``0.32`` or ``0.25.1``, or of ``eb-vllm``.

    Raises UsageError for versions whose rules are unknown.
    """
    if version == EB_VLLM:
        return _OF_EB_VLLM
    release = release_of(version)
    if release is None:
        raise UsageError(f"--vllm-version must be like {DEFAULT_VLLM} or 0.25.1, not {version!r}")
    if not STARTS[0].since <= release <= NEWEST:
        oldest, newest = (".".join(map(str, one)) for one in (STARTS[0].since, NEWEST))
        raise UsageError(
            f"how vLLM {version} sizes its KV cache is not known here, {oldest} to {newest} are; take the nearest of "
            "them, or give the size with --num-kv-blocks"
        )
    return [rules for rules in STARTS if rules.since <= release][-1]
