"""The environment of a run: where it ran and what was asked of it. Only runs that agree in it are compared."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ebbench.analysis.load import Load
from ebbench.errors import UnknownNameError
from ebbench.records.manifest import Manifest

ENVIRONMENT = (
    "engine", "device", "driver", "vllm", "model", "workload", "scenario", "source", "options",
)  # fmt: skip
"""Names of what must agree. ``options`` are the scheduler settings and, of several engines, how they are joined."""

LATER_OPTIONS = {"enforce_eager": False, "warmup": 0, "quantization": None, "kv_cache_dtype": "auto"}
"""Options that older runs did not record, and what they ran with: at that value they are no part of a comparison."""

JOINED = ("topology", "link", "replicas", "dispatch", "decode_dispatch", "vllm_options")
"""Facts that count as options where a run has them: how several engines are joined, options passed to vLLM as they are.

A single engine without such options has none of them, so its stored baselines keep their hash.
"""

UNKNOWN = ""


def environment_of(manifest: Manifest) -> dict[str, str]:
    """What must agree, as text; what a run does not record is empty and agrees only with empty."""
    return {
        "engine": manifest.engine,
        "device": manifest.device,
        "driver": _recorded(manifest, "driver"),
        "vllm": _recorded(manifest, "vllm"),
        "model": manifest.model,
        "workload": manifest.workload,
        "scenario": manifest.scenario,
        "source": manifest.source,
        "options": json.dumps(_compared(manifest), sort_keys=True),
    }


def _compared(manifest: Manifest) -> dict[str, Any]:
    options = {name: value for name, value in manifest.options.items() if LATER_OPTIONS.get(name, UNKNOWN) != value}
    return options | {name: manifest.facts[name] for name in JOINED if name in manifest.facts}


def _recorded(manifest: Manifest, name: str) -> str:
    """A version the engine recorded, among the versions or the facts."""
    found: Any = manifest.versions.get(name) or manifest.facts.get(name) or manifest.facts.get(f"{name}_version")
    return str(found) if found else UNKNOWN


def load_of(manifest: Manifest) -> str:
    """How many sessions came how fast, in words: runs that differ in it answer different questions."""
    if manifest.phases:
        return ", ".join(f"{one.sessions} sessions at concurrency {one.max_concurrency}" for one in manifest.phases)
    facts = manifest.facts
    given = {
        "rate": facts.get("request_rate"),
        "saturation rate": facts.get("saturation_rate"),
        "burstiness": facts.get("burstiness"),
        "speed": facts.get("speed"),
        "concurrency cap": manifest.max_concurrency,
    }
    shown = [f"{name} {value:g}" for name, value in given.items() if value is not None]
    return ", ".join([f"{facts.get('sessions') or manifest.rows.get('plan', 0)} sessions", *shown])


def conditions_of(environment: Mapping[str, str], load: Load) -> dict[str, str]:
    """Everything that the figures of a run depend on beside its policy and seed: name and text, options one by one.

    Runs that agree in it asked the same question, so only these are averaged, and only these get gains.
    """
    found = {name: environment.get(name, UNKNOWN) for name in ENVIRONMENT if name != "options"}
    options = environment.get("options", UNKNOWN)
    named = {name: str(value) for name, value in (json.loads(options) if options else {}).items()}
    return found | load.conditions() | named


def differences(one: Mapping[str, str], other: Mapping[str, str], allowed: Sequence[str] = ()) -> list[str]:
    """Every key in which two environments differ, as ``device: h200 against l40s``; options one by one."""
    found = []
    for name in ENVIRONMENT:
        ours, theirs = one.get(name, UNKNOWN), other.get(name, UNKNOWN)
        if ours == theirs or name in allowed:
            continue
        found += _options(ours, theirs) if name == "options" else [f"{name}: {_shown(ours)} against {_shown(theirs)}"]
    return found


def differing_names(environments: Sequence[Mapping[str, str]]) -> list[str]:
    """Names in which any of some environments differ from the first, options by their own names."""
    found = [text for other in environments[1:] for text in differences(environments[0], other)]
    return list(dict.fromkeys(text.partition(":")[0].removeprefix("options.") for text in found))


def _options(ours: str, theirs: str) -> list[str]:
    one, other = (json.loads(text) if text else {} for text in (ours, theirs))
    names = sorted(set(one) | set(other))
    return [
        f"options.{name}: {one.get(name)} against {other.get(name)}"
        for name in names
        if one.get(name) != other.get(name)
    ]


def _shown(value: str) -> str:
    return value or "not recorded"


def check_allowed(names: Sequence[str]) -> tuple[str, ...]:
    """Raise UnknownNameError for a name that is not of ENVIRONMENT."""
    for name in names:
        if name not in ENVIRONMENT:
            raise UnknownNameError("environment key", name, ENVIRONMENT)
    return tuple(names)
