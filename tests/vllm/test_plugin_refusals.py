"""What the plugin cannot do right is refused at start, with the remedy."""

from __future__ import annotations

from typing import Any

import pytest
from emulation import CALIBRATION

from ebbench.engines.base import EngineOptions
from vllm_eb.config import SCHEDULER, ConfigError, additional_config
from vllm_eb.policy import parse_policy

pytestmark = pytest.mark.vllm

OPTIONS = EngineOptions(max_num_seqs=4, max_num_batched_tokens=64)


def start(config: dict[str, Any], asynchronous: bool = True) -> Any:
    from dataclasses import replace

    from ebbench.engines.emulated_core import build_core

    return build_core(100, replace(OPTIONS, async_scheduling=asynchronous), SCHEDULER, config).scheduler


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "needs its settings"),
        ({"vllm_eb": {"polcy": "v0"}}, "did you mean 'policy'"),
        ({"vllm_eb": {"policy": "ebb"}}, "unknown policy 'ebb'"),
        ({"vllm_eb": {"policy": "eb"}}, "alpha_p, beta_p, alpha_d, beta_d"),
        ({"vllm_eb": {"policy": "deferred"}}, "deferred:k=32"),
    ],
)
def test_wrong_settings_stop_the_engine_with_a_clear_message(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start(config)


@pytest.mark.parametrize(
    ("section", "setting", "value", "named"),
    [
        ("", "speculative_config", object(), "speculative decoding"),
        ("parallel_config", "pipeline_parallel_size", 2, "pipeline parallelism"),
        ("", "kv_transfer_config", object(), "a KV connector"),
        ("model_config", "runner_type", "pooling", "pooling models"),
        ("scheduler_config", "prefill_schedule_interval", 4, "--prefill-schedule-interval"),
        ("scheduler_config", "watermark", 0.01, "--watermark"),
    ],
)
def test_what_cannot_be_combined_is_refused(section: str, setting: str, value: object, named: str) -> None:
    from types import SimpleNamespace

    from vllm_eb.compat import refuse_unsupported

    config = SimpleNamespace(
        speculative_config=None,
        kv_transfer_config=None,
        ec_transfer_config=None,
        lora_config=None,
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        scheduler_config=SimpleNamespace(prefill_schedule_interval=1, watermark=0.0),
        model_config=SimpleNamespace(runner_type="generate", is_diffusion=False, is_encoder_decoder=False),
    )
    refuse_unsupported(config)
    setattr(getattr(config, section) if section else config, setting, value)
    with pytest.raises(ConfigError, match=named):
        refuse_unsupported(config)
    if named.startswith("--"):
        refuse_unsupported(config, only_records=True)


def test_the_scheduler_is_the_one_for_the_engines_mode() -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    config = additional_config(parse_policy("ebplus"), CALIBRATION)
    assert isinstance(start(config), AsyncScheduler)
    assert not isinstance(start(config, asynchronous=False), AsyncScheduler)
