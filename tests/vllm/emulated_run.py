"""A run through vLLM's API server with an emulated device: ``python -m tests.vllm.emulated_run MODEL FOLDER ...``.

A process of its own, since servers of the engine are forks where their parent is one (tests/vllm/template.py).
"""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow.parquet as pq

from ebbench.engines.vllm import VllmEngine
from ebbench.engines.vllm_command import Emulation
from ebbench.spec.client import ClientOptions
from ebbench.spec.server import EngineOptions
from tests.vllm.emulation import DEVICE, Traffic, make_plan
from vllm_eb.policy import parse_policy

TABLES = ("requests", "steps", "decisions")
BLOCKS = 300
OPTIONS = EngineOptions(max_num_seqs=16, max_num_batched_tokens=512, max_model_len=2048, num_kv_blocks=BLOCKS)


def main(model: str, folder: Path, *vllm_options: str) -> None:
    """Run in real time, at half the speed of the device; write the tables of the result into the folder."""
    engine = VllmEngine(
        model=model,
        client=ClientOptions(workers=0, metrics_interval_s=None),
        emulation=Emulation("h200", "qwen3-8b", slow_motion=2.0),
        log=folder / "server.log",
        vllm_options=vllm_options,
    )
    plan = make_plan(Traffic(sessions=20, concurrency=8, max_output=20))
    result = engine.run(plan, parse_policy("eb:k=3"), DEVICE, OPTIONS)
    for name in TABLES:
        pq.write_table(getattr(result, name), folder / f"{name}.parquet")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
