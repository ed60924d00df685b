"""Settings of all tests: Hypothesis deadlines and the order of the files; how vLLM servers start their processes."""

import gc
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.vllm import forking as forking_plugin
from tests.vllm.forked_command import ADDRESS, started

# A machine may be slow: no property test fails for the time that one example takes. `make nightly` tries more examples.
settings.register_profile("untimed", deadline=None)
settings.register_profile("thorough", deadline=None, max_examples=500)
settings.load_profile(os.environ.get("EXAMPLES", "untimed"))

# Processes inherit signals that are ignored: SIGHUP under nohup, SIGINT in the background of a shell. The processes of
# tests start with none ignored, or those that are signalled would not end.
for ignored in (signal.SIGHUP, signal.SIGINT):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, signal.default_int_handler if ignored is signal.SIGINT else signal.SIG_DFL)

# What runs note about servers is not for the user who runs the tests; their processes inherit it.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="ebbench-state-")

# Runs of tests are not those of the CI job that runs them.
for variable in ("GITHUB_SHA", "GITHUB_REF", "GITHUB_REF_NAME", "CI_COMMIT_SHA", "GIT_COMMIT", "BUILDKITE_COMMIT"):
    os.environ.pop(variable, None)

LONGEST = (
    "tests/vllm/test_validate.py",
    "tests/vllm/test_signals_vllm.py",  # nine vLLM servers, one after the other
    "tests/docs/test_docs.py",
    "tests/vllm/test_engine_vllm.py",
    "tests/sweep/test_ray_cluster.py",  # mostly waiting
    "tests/vllm/test_serving_mix.py",
    "tests/client/test_client_nodes.py",  # mostly waiting
    "tests/vllm/test_sim_equals_emulated.py",
    "tests/vllm/test_plugin_alone.py",
    "tests/vllm/test_upstream.py",
    "tests/processes/test_signals.py",
    "tests/capacity/test_on_server.py",  # mostly waiting; not first, when every process imports vLLM
    "tests/report/test_page.py",
    "tests/gate/test_github.py",
    "tests/vllm/test_token_identity.py",
    "tests/vllm/test_capacity.py",
    "tests/capacity/test_search.py",
    "tests/client/test_client_cli.py",
    "tests/gateway/test_gateway.py",
    "tests/gateway/test_faults.py",
    "tests/vllm/test_replicas.py",
    "tests/vllm/test_empty_steps.py",
    "tests/capacity/test_saturation.py",
    "tests/workloads/test_hub.py",
    "tests/sweep/test_sweep_on_server.py",
    "tests/client/test_client_drive.py",
    "tests/capacity/test_plan.py",
    "tests/capacity/test_api_server.py",
    "tests/sweep/test_sweep_runs.py",
    "tests/tables/test_cluster_tables.py",
    "tests/validation/test_validate_command.py",
    "tests/client/test_client_sessions.py",
    "tests/vllm/test_fuzz_scheduler.py",
    "tests/devices/test_calibrate.py",
    "tests/vllm/test_fuzz_catches.py",
)
"""Files that take longest, the longest first, beside each other such as wait and such as compute. The tests of a file
run in one process: begun last, they would keep one process busy for minutes while the others are idle."""

APART = ("tests/docs/test_docs.py", "tests/capacity/test_on_server.py")
"""Files whose tests share nothing and take minutes: they run in any process, at the same time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files; the order within a file and of the others stays."""
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(LONGEST)))


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """The million objects that it makes live to the end: they are not searched for garbage, now or later."""
    gc.disable()
    yield
    gc.enable()
    gc.freeze()


def pytest_runtest_setup() -> None:
    """Commands of a test are the first of their process: no line of progress is due since one of another test."""
    if live := sys.modules.get("ebbench.render.live"):
        live._Lines.last_s = time.monotonic()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Processes of pytest get whole files (``--dist loadfile``), of the files in APART single tests."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return nodeid if file in APART else file

    return Scheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def one_worker() -> Iterator[None]:
    """Commands in this process start no pools of their own accord: a worker spends a second on its imports, and the
    other processor runs other tests. What pools do is tested where they are asked for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ebbench.runs.pool.usable_processors", lambda: 1)
        yield


@pytest.fixture
def fewer_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans simulate a quarter of their sessions, which is enough for loads far from those that one replica carries."""
    monkeypatch.setattr("ebbench.sizing.candidates.SESSIONS", 500)


@pytest.fixture(scope="session")
def forking_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PYTHONPATH under which vLLM servers fork their processes: see tests/vllm/forking.py."""
    places = [str(forking_plugin.install(tmp_path_factory.mktemp("forking"))), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, places))


@pytest.fixture(scope="session")
def template_place(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder that all processes of pytest share: see tests/vllm/forked_command.py."""
    own = tmp_path_factory.getbasetemp()
    return str(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)


@pytest.fixture(scope="session")
def warm_python(template_place: str) -> str:
    """Words of a shell that run Python as a fork of a process which has imported ebbench."""
    name = started(Path(template_place), os.environ, "ebbench")
    return shlex.join([sys.executable, "-I", "-S", str(Path(forking_plugin.__file__).with_name("shim.py")), name])


@pytest.fixture(scope="module")
def forking(forking_path: str, template_place: str) -> Iterator[None]:
    """Servers of a file fork their processes; commands that start servers are forks of a process with vLLM imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", forking_path)
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv(ADDRESS, template_place)
        yield
