"""Everything here needs vLLM; without it the folder is skipped.

It is looked for, not imported: that takes longer than most tests, and every run of pytest collects this folder.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
# By default vLLM binds a model's threads to particular cores, and every server chooses the same ones. Servers that run
# at the same time (of two pytest processes, or replicas) would share one core and leave the other idle.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# vLLM's n-gram drafter loads numba, which sets OpenMP to a thread per core whatever the line above says. From then on
# each operation of torch in the process waits, spinning, for a second thread: ten times the CPU time.
os.environ.setdefault("NUMBA_NUM_THREADS", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # engines of these tests live in the test process

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)


@pytest.fixture(scope="session")
def small_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random-weight model with its tokenizer, the same every time."""
    from tests.vllm import small_model

    return small_model.build(tmp_path_factory.mktemp("model"))
