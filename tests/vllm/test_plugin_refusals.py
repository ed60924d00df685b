"""Settings that the plugin does not support are refused at the start, with the remedy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ebbench.spec.server import EngineOptions
from tests.vllm.emulation import CALIBRATION
from vllm_eb import compat
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
        ("", "speculative_config", SimpleNamespace(method="medusa"), "speculative decoding by medusa"),
        (
            "",
            "speculative_config",
            SimpleNamespace(method="ngram", num_speculative_tokens=255),
            "more than 254 drafted",
        ),
        ("parallel_config", "pipeline_parallel_size", 2, "pipeline parallelism"),
        ("", "kv_transfer_config", object(), "a KV connector"),
        ("model_config", "runner_type", "pooling", "pooling models"),
        ("scheduler_config", "prefill_schedule_interval", 4, "--prefill-schedule-interval"),
        ("scheduler_config", "watermark", 0.01, "--watermark"),
    ],
)
def test_vllm_settings_that_the_plugin_does_not_support_are_refused(
    section: str, setting: str, value: object, named: str
) -> None:
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
    if named == "--prefill-schedule-interval":
        refuse_unsupported(config, counts_passes=True)


@pytest.mark.parametrize("name", [*compat.METHODS, *compat.REQUEST, *compat.OUTPUT])
def test_a_vllm_that_lacks_a_method_or_field_is_refused_in_one_sentence(name: str) -> None:
    """Each is looked for; all are there in the installed vLLM."""
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    compat.check_classes(Scheduler, Request, SchedulerOutput, "0.32.0")

    def init(self: Any) -> None:
        for attribute in compat.REQUEST:
            setattr(self, attribute, None)

    names = {one for one in compat.REQUEST if one != name}
    code = init.__code__.replace(co_names=tuple(names))
    init.__code__ = code
    request = type("Request", (), {"__init__": init})
    body = {one: getattr(Scheduler, one) for one in compat.METHODS if one != name}
    fields = {one: None for one in compat.OUTPUT if one != name}
    with pytest.raises(ConfigError, match=rf"last tested with vLLM {compat.TESTED_LAST}, and vLLM 9.9 lacks.*{name}"):
        compat.check_classes(
            type("Scheduler", (), body), request, type("Output", (), {"__dataclass_fields__": fields}), "9.9"
        )


@pytest.mark.parametrize("group", compat.ATTRIBUTES)
def test_a_scheduler_that_lacks_an_attribute_is_refused_in_one_sentence(group: tuple[str, ...]) -> None:
    def made(without: tuple[str, ...]) -> SimpleNamespace:
        found = SimpleNamespace()
        for path in (path for paths in compat.ATTRIBUTES for path in paths if paths != without):
            place = found
            *folders, last = path.split(".")
            for folder in folders:
                place.__dict__.setdefault(folder, SimpleNamespace())
                place = getattr(place, folder)
            setattr(place, last, 0)
        return found

    compat.check_scheduler(made(()), "9.9")
    with pytest.raises(ConfigError, match=r"vLLM 9\.9 lacks"):
        compat.check_scheduler(made(group), "9.9")


def test_the_scheduler_is_the_one_for_the_engines_mode() -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    config = additional_config(parse_policy("ebplus"), CALIBRATION)
    assert isinstance(start(config), AsyncScheduler)
    assert not isinstance(start(config, asynchronous=False), AsyncScheduler)
