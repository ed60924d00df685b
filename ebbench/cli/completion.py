"""Shell completion: names of workloads, scenarios, policies, dispatch policies, devices and models.

Every key press starts the program, so these functions only list file names and import no heavy modules. If no name
matches, the shell offers files.
"""

from __future__ import annotations

from pathlib import Path

from ebbench.installation import bundled_dir

_DEVICES = Path(__file__).resolve().parents[1] / "devices" / "data"
ENGINES = ("auto", "sim", "emulated", "vllm", "http://")


def workloads(incomplete: str) -> list[str]:
    """Bundled workloads, and the prefixes of recorded requests."""
    return _beginning(incomplete, [*_stems(bundled_dir("workloads")), "log:", "trace:"])


def scenarios(incomplete: str) -> list[str]:
    """Bundled scenarios."""
    return _beginning(incomplete, _stems(bundled_dir("scenarios")))


def policies(incomplete: str) -> list[tuple[str, str]]:
    """Policies with their descriptions."""
    from vllm_eb.policy import descriptions

    return [(name, text) for name, text in descriptions().items() if name.startswith(incomplete)]


def dispatch(incomplete: str) -> list[tuple[str, str]]:
    """Dispatch policies with their descriptions."""
    from ebbench.dispatch import DESCRIPTIONS

    return [(name, text) for name, text in DESCRIPTIONS.items() if name.startswith(incomplete)]


def engines(incomplete: str) -> list[str]:
    """Engines, and the prefix of a server's URL."""
    return _beginning(incomplete, ENGINES)


def devices(incomplete: str) -> list[str]:
    """Devices with a profile."""
    return _beginning(incomplete, _stems(_DEVICES / "profiles"))


def api_servers(incomplete: str) -> list[str]:
    """Classes of machines whose API server can be simulated, and none."""
    return _beginning(incomplete, [*_stems(_DEVICES / "api_servers"), "off"])


def api_servers_or_auto(incomplete: str) -> list[str]:
    """The same, and where it would be busy."""
    return [*api_servers(incomplete), *_beginning(incomplete, ["auto"])]


def models(incomplete: str) -> list[str]:
    """Models with known geometry."""
    import tomllib

    return _beginning(incomplete, sorted(tomllib.loads((_DEVICES / "models.toml").read_text(encoding="utf-8"))))


def _stems(directory: Path) -> list[str]:
    return sorted(path.stem for path in directory.glob("*.toml"))


def _beginning(incomplete: str, names: list[str] | tuple[str, ...]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
