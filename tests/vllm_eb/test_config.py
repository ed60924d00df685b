"""The plugin's settings: a round trip through JSON, and errors that name the remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_eb.calibration import Calibration, MixedCost, calibration_to_json
from vllm_eb.config import ConfigError, additional_config, needs_calibration, parse_config
from vllm_eb.policy import parse_policy

COSTS = Calibration(1e-3, 2e-5, 3e-3, 4e-5, mixed=MixedCost(1e-5, 2e-5, -1e-6), margin=1e-5, source="test")


@pytest.mark.parametrize("name", ["v0", "deferred:k=32", "eb", "eb:theta=0.5", "ebplus:margin=1e-05", "v1"])
def test_round_trip_through_json(name: str, tmp_path: Path) -> None:
    policy = parse_policy(name)
    written = json.loads(json.dumps(additional_config(policy, COSTS, tmp_path)))
    config = parse_config(written)
    assert (config.policy, config.calibration, config.record) == (policy, COSTS, tmp_path)


def test_a_mapping_and_a_file_say_the_same(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(calibration_to_json(COSTS), encoding="utf-8")
    config = parse_config({"vllm_eb": {"policy": {"kind": "eb", "window": 100}, "calibration": str(file)}})
    assert config.policy == parse_policy("eb:window=100")
    assert config.calibration == COSTS
    assert additional_config(config.policy, file) == {"vllm_eb": {"policy": "eb:window=100", "calibration": str(file)}}


def test_only_policies_that_compute_need_costs() -> None:
    needing = {name for name in ("v0", "v1", "deferred:k=2", "eb", "eb:k=2", "eb:theta=0.1", "ebplus") if
               needs_calibration(parse_policy(name))}  # fmt: skip
    assert needing == {"eb", "ebplus"}
    for name in ("v0", "eb:k=2"):
        assert parse_config({"vllm_eb": {"policy": name}}).record is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (None, "needs its settings"),
        ("ebplus", "needs its settings"),
        ({"policy": "ebplus", "calbration": {}}, "did you mean 'calibration'"),
        ({"policy": "ebplus", "zzz": 1}, "known: calibration, policy, record"),
        ({"policy": 3}, 'must be a policy string such as "ebplus", not 3'),
        ({"policy": "ebplus:margn=1"}, "margn"),
        ({"policy": "ebplus"}, "set vllm_eb.calibration to a JSON file"),
        ({"policy": "ebplus", "calibration": "/nowhere/costs.json"}, "/nowhere/costs.json cannot be read"),
        ({"policy": "ebplus", "calibration": {"alpha_p": 1}}, "beta_p"),
        ({"policy": "ebplus", "calibration": [1]}, "JSON object"),
        ({"policy": "v0", "record": 7}, "must be the path of a directory, not 7"),
    ],
)
def test_wrong_plugin_settings_are_refused_with_the_remedy(settings: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({"vllm_eb": settings})
