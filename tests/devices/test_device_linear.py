"""The linear cost model with the published coefficients."""

from __future__ import annotations

import pytest

from ebbench.devices.base import StepShape
from ebbench.devices.costs import decode_shape, prefill_shape
from ebbench.devices.loader import load_device
from ebbench.errors import UsageError
from vllm_eb.settings import GivenValueError


def test_published_coefficients_are_used() -> None:
    cost = load_device("h200", "qwen3-8b", cost="linear").cost
    assert cost.step_s(prefill_shape(1000)) == pytest.approx(0.0012785933415095027 + 2.4852551825304505e-05 * 1000)
    assert cost.step_s(decode_shape(100, 50)) == pytest.approx(0.008921181622454422 + 4.586467522217373e-05 * 100)


def test_mixed_steps_follow_beta_mb() -> None:
    """The H200 polynomial gives back the throughput it was fitted on (beta_mb_scenarios.csv: 18,317 at r = 0.5)."""
    device = load_device("h200", "qwen3-8b", cost="linear")
    assert device.calibration.mixed is not None
    assert 1 / device.calibration.mixed.at(0.5) == pytest.approx(18_317, rel=0.001)
    step = device.cost.step_s(StepShape(((512, 0),), 512, 512 * 512, 513))
    assert step == pytest.approx(device.calibration.alpha_p + device.calibration.mixed.at(0.5) * 1024)


def test_without_a_measured_mixed_cost_parts_add_up_and_a_warning_says_so() -> None:
    device = load_device("h200", "llama-3.1-8b", cost="linear")
    assert any("not published" in warning for warning in map(str, device.warnings))
    cal = device.calibration
    mixed = device.cost.step_s(StepShape(((512, 0),), 64, 64 * 512, 65))
    assert mixed == pytest.approx(max(cal.alpha_p, cal.alpha_d) + cal.beta_p * 512 + cal.beta_d * 64)


def test_llama_is_known_under_both_its_names() -> None:
    device = load_device("rtx-pro-6000", "llama-3.1-8b", cost="linear")
    assert device.calibration.alpha_d == pytest.approx(0.009764624062893613)


@pytest.mark.parametrize(
    "numbers", ["1e-3,1e-6,1e-3,1e-6,1e300", "1e-3,1e-6,1e-3,1e-6,nan", "1e300,1e-6,1e-3,1e-6,500000"]
)
def test_constants_that_no_simulation_can_hold_are_refused(numbers: str) -> None:
    with pytest.raises((UsageError, GivenValueError), match="at most"):
        load_device(f"linear:{numbers}", "m")
