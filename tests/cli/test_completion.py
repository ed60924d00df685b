"""Shell completion: names that exist are offered, by the program as the shell calls it, without heavy imports."""

import os
import subprocess
import sys

import pytest

from ebbench.config.options import completing
from ebbench.devices.profiles import list_devices, list_models
from ebbench.traffic.spec import list_scenarios
from ebbench.workloads.spec import list_workloads
from vllm_eb.policy import descriptions


def test_completion_offers_every_bundled_name() -> None:
    assert completing("workloads")("") == [*list_workloads(), "log:", "trace:"]
    assert completing("scenarios")("") == list_scenarios()
    assert completing("devices")("") == list(list_devices())
    assert completing("models")("") == list(list_models())
    assert [name for name, _ in completing("policies")("")] == list(descriptions())
    for offered in map(completing, ("workloads", "scenarios", "devices", "models")):
        name = str(offered("")[0])
        assert name in offered(name[:2])
        assert offered("no such beginning") == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ebbench run sha", {"sharegpt"}),
        ("ebbench run sharegpt --policy eb", {"eb", "ebplus"}),
        ("ebbench run sharegpt --scenario sat", {"saturated", "saturation-steps"}),
        ("ebbench run sharegpt --device h1", {"h100", "h100-pcie"}),
        ("ebbench advise sharegpt --model qwen3-8", {"qwen3-8b"}),
        ("ebbench workloads show bal", {"balanced"}),
        ("ebbench devices show h2", {"h200"}),
        ("ebbench scenarios show pois", {"poisson"}),
        ("ebbench run sharegpt --dispatch pow", {"power-of-two"}),
        ("ebbench run sharegpt --api-server ", {"auto", "datacenter", "off"}),
        ("ebbench validate --api-server ", {"datacenter", "off"}),
    ],
)
def test_bash_gets_the_completions_of_a_line(line: str, expected: set[str]) -> None:
    words = line.split(" ")
    environ = {
        **os.environ,
        "_EBBENCH_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    shown = subprocess.run([sys.executable, "-m", "ebbench"], env=environ, capture_output=True, text=True, check=False)
    assert set(shown.stdout.split()) == expected, shown.stderr


@pytest.mark.parametrize("offered", ["workloads", "scenarios", "devices", "models", "engines", "policies", "dispatch"])
def test_names_are_found_without_heavy_imports(offered: str) -> None:
    heavy = ["pyarrow", "httpx", "rich", "scipy", *([] if offered in ("policies", "dispatch") else ["numpy"])]
    code = (
        f"import sys\nfrom ebbench.config.options import completing\ncompleting('{offered}')('')\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
