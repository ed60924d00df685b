"""A vLLM plugin for tests: a server forks its engine core and worker instead of starting two more interpreters.

vLLM's CPU platform starts every process anew, and each imports vLLM and torch, which takes most of the time that a
server needs to come up. On CUDA vLLM can fork, which is the default of its ``LLM`` class. Nothing else differs: the
processes, their parents and what runs in them are the same. The children use one thread for the model
(``OMP_NUM_THREADS=1``), as threads do not survive a fork.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
from pathlib import Path
from typing import Any

GROUP = "vllm.general_plugins"


def install(folder: Path) -> Path:
    """Install this module there as a plugin; returns the folder, for PYTHONPATH."""
    return install_plugin(folder, Path(__file__), "fork_engines")


def install_plugin(folder: Path, module: Path, function: str) -> Path:
    """Put a module there as an installed distribution whose ``function`` vLLM calls in each of its processes."""
    name = module.stem
    information = folder / f"{name}-1.dist-info"
    information.mkdir(parents=True)
    shutil.copy(module, folder / module.name)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n", encoding="utf-8")
    (information / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {name}:{function}\n", encoding="utf-8")
    return folder


def fork_engines() -> None:
    """Make vLLM fork its processes. Called by vLLM in each process before it reads its configuration."""
    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config

    def updated(config: Any) -> None:
        update(config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # the platform has set "spawn"

    CpuPlatform.check_and_update_config = staticmethod(updated)
    gc.freeze()  # vLLM searches all that is imported for garbage eight times, 0.8 s each
    # A child would pass its signals on to the event loop of its parent, through the descriptor that both have.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
