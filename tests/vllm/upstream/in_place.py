"""A pytest plugin (``-p in_place``) for vLLM's tests: puts our scheduler in place of vLLM's, and records the results.

UPSTREAM_POLICY    the policy; empty: vLLM's own scheduler
UPSTREAM_OUTCOMES  the file to write: one JSON object per test
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest

# The costs of a device on which batch and prompt both count; the tests look at contents of steps, not at times.
COSTS = {
    "alpha_p": 5e-3,
    "beta_p": 17e-6,
    "alpha_d": 3e-3,
    "beta_d": 31e-6,
    "mixed": {"a": 2e-5, "b": 6e-5, "c": -3e-5},
}

IMAGE_TOKENS = 576  # of LLaVA 1.5


def pytest_configure(config: pytest.Config) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # ours, in a fork of a process that has imported them

    from vllm.engine import arg_utils
    from vllm.transformers_utils.utils import maybe_model_redirect

    config.addinivalue_line("markers", "cpu_test: vLLM's")
    config.addinivalue_line("markers", "skip_global_cleanup: vLLM's")
    # Without the hub, EngineArgs looks for a model in its cache before it is redirected.
    arg_utils.get_model_path = lambda model, *_: maybe_model_redirect(model)
    stand_in_for_llava()
    if policy := os.environ["UPSTREAM_POLICY"]:
        put_in_place(policy)


def stand_in_for_llava() -> None:
    """A model class that takes images. That of vLLM imports torchvision, which is absent beside the CPU build.

    The scheduler asks only whether there are images, and for the encoder's budget.
    """
    import torch
    from vllm.config import ModelConfig
    from vllm.model_executor.models.interfaces import SupportsMultiModal
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.v1.core.encoder_cache_manager import compute_mm_encoder_budget
    from vllm.v1.core.sched import scheduler

    class Llava(torch.nn.Module, SupportsMultiModal):  # type: ignore[misc]
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__()

        def embed_input_ids(self, input_ids: Any) -> Any:
            return input_ids

        def forward(self, input_ids: Any, positions: Any) -> Any:
            return input_ids

        def compute_logits(self, hidden_states: Any) -> Any:
            return hidden_states

    class Budget:
        def __init__(self, vllm_config: Any, *_: Any) -> None:
            found = compute_mm_encoder_budget(vllm_config.scheduler_config, {"image": IMAGE_TOKENS})
            self.encoder_compute_budget, self.encoder_cache_size = found
            self.mm_max_toks_per_item = {"image": IMAGE_TOKENS}

    ModelRegistry.register_model("LlavaForConditionalGeneration", Llava)
    ModelConfig._supports_multimodal_inputs = lambda self: self.is_multimodal_model
    scheduler.MultiModalBudget = Budget


@pytest.fixture
def caplog_vllm(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """As in vLLM's conftest: its log lines reach pytest."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("vllm"), "level", logging.INFO)
    return caplog


def put_in_place(policy: str) -> None:
    """Replace vLLM's scheduler classes by the plugin under that policy."""
    # These modules subclass vLLM's scheduler: they must do so before it is replaced.
    from vllm.v1.core.sched import async_scheduler, diffusion_scheduler, scheduler  # noqa: F401

    from vllm_eb.scheduler import EBScheduler, EBSyncScheduler

    settings = {"vllm_eb": {"policy": policy, "calibration": COSTS}}

    class PlainInPlace(EBSyncScheduler):
        def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            vllm_config.additional_config = settings
            super().__init__(vllm_config, *args, **kwargs)

    class AsyncInPlace(EBScheduler):
        def __new__(cls, *_: Any, **__: Any) -> AsyncInPlace:
            # As the test asks, though vLLM's configuration says on a CPU that scheduling is not asynchronous.
            return object.__new__(cls)

        def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            vllm_config.additional_config = settings
            super().__init__(vllm_config, *args, **kwargs)

    scheduler.Scheduler = PlainInPlace
    async_scheduler.AsyncScheduler = AsyncInPlace


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    outcome = yield
    report = outcome.get_result()
    if report.when == "call" or report.outcome != "passed":
        found = call.excinfo
        problem = "" if report.outcome == "passed" or found is None else f"{found.typename}: {found.value}"
        _note({"test": item.nodeid, "outcome": report.outcome, "problem": problem})


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _note({"test": report.nodeid, "outcome": "failed", "problem": str(report.longrepr)[-2000:]})


def _note(row: dict[str, str]) -> None:
    with Path(os.environ["UPSTREAM_OUTCOMES"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
