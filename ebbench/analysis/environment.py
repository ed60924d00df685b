"""The environment of a run: hardware, software and settings. Runs are compared only if their environments agree."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ebbench.analysis.load import LoadFacts
from ebbench.errors import UnknownNameError
from ebbench.records.manifest import Manifest

ENVIRONMENT = (
    "engine", "device", "driver", "vllm", "model", "workload", "scenario", "source", "options",
)  # fmt: skip
"""Names of conditions that must agree. ``options``: scheduler settings and, for several engines, their topology."""

LATER_OPTIONS = {
    "enforce_eager": False, "warmup": 0, "quantization": None, "kv_cache_dtype": "auto", "api_server": "off",
    "api_server_count": None, "max_num_active_seqs": None, "long_prefill_token_threshold_adaptive": False,
    "max_num_queued_reqs": None, "max_num_queued_tokens": None, "scheduler_reserve_full_isl": True,
    "gpu_memory_utilization": None, "vllm_version": None,
}  # fmt: skip
"""Options that older runs did not record, with the values that they ran with."""

JOINED = ("topology", "link", "replicas", "dispatch", "decode_dispatch", "vllm_options")
"""Facts that count as options if a run has them: topology of several engines, options passed to vLLM unchanged.

Runs of a single engine without such options do not have them, so their stored baselines keep their hash.
"""

UNKNOWN = ""
UNKNOWN_DEVICE = "unknown"
"""Device name stored for a server that ebbench did not start, if nobody stated it."""


def environment_of(manifest: Manifest) -> dict[str, str]:
    """Conditions as text; a condition that a run does not record is empty and agrees only with an empty one."""
    return {
        "engine": manifest.engine,
        "device": _device(manifest),
        "driver": _recorded(manifest, "driver"),
        "vllm": _recorded(manifest, "vllm"),
        "model": _model(manifest),
        "workload": manifest.workload,
        "scenario": manifest.scenario,
        "source": manifest.source,
        "options": json.dumps(_compared(manifest), sort_keys=True),
    }


def _device(manifest: Manifest) -> str:
    """The device with what tells it from others of its name: an own profile's numbers, or the machine of a server.

    Two servers whose device nobody stated are not comparable across machines, however alike their addresses are.
    """
    machine = manifest.facts.get("server_machine") if manifest.device == UNKNOWN_DEVICE else None
    facts = (machine or manifest.facts.get("device_profile"), manifest.facts.get("kernel_library"))
    apart = ", ".join(filter(None, facts))
    return f"{manifest.device} ({apart})" if apart else manifest.device


def _model(manifest: Manifest) -> str:
    """The model with what tells it from others of its name: an own shape, and the models that answered in its place."""
    others = manifest.facts.get("other_models")
    answers = f"answers of {', '.join(sorted(others))}" if others else ""
    apart = ", ".join(filter(None, [manifest.facts.get("model_shape"), answers]))
    return f"{manifest.model} ({apart})" if apart else manifest.model


def _compared(manifest: Manifest) -> dict[str, Any]:
    options = {name: value for name, value in manifest.options.items() if LATER_OPTIONS.get(name, UNKNOWN) != value}
    return options | {name: manifest.facts[name] for name in JOINED if name in manifest.facts}


def unusual_options(options: Mapping[str, Any]) -> str:
    """Those of LATER_OPTIONS, except ``warmup``, that differ from the values of older runs, as text."""
    found = {name: options.get(name, value) for name, value in LATER_OPTIONS.items() if name != "warmup"}
    return json.dumps({name: value for name, value in found.items() if value != LATER_OPTIONS[name]}, sort_keys=True)


def _recorded(manifest: Manifest, name: str) -> str:
    """A version that the engine recorded, among the versions or the facts."""
    found: Any = manifest.versions.get(name) or manifest.facts.get(name) or manifest.facts.get(f"{name}_version")
    return str(found) if found else UNKNOWN


def load_of(manifest: Manifest) -> str:
    """The load in words: number and rate of sessions."""
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


def conditions_of(environment: Mapping[str, str], load: LoadFacts) -> dict[str, str]:
    """Everything that the figures of a run depend on besides policy and seed: name and text, options one by one.

    Only runs that agree in all conditions are averaged and get gains.
    """
    found = {name: environment.get(name, UNKNOWN) for name in ENVIRONMENT if name != "options"}
    options = environment.get("options", UNKNOWN)
    named = {name: str(value) for name, value in (json.loads(options) if options else {}).items()}
    return found | load.conditions() | named


def differences(one: Mapping[str, str], other: Mapping[str, str], allowed: Sequence[str] = ()) -> list[str]:
    """The keys in which two environments differ, as ``device: h200 against l40s``; options one by one."""
    found = []
    for name in ENVIRONMENT:
        ours, theirs = one.get(name, UNKNOWN), other.get(name, UNKNOWN)
        if ours == theirs or name in allowed:
            continue
        found += _options(ours, theirs) if name == "options" else [f"{name}: {_shown(ours)} against {_shown(theirs)}"]
    return found


def differing_names(environments: Sequence[Mapping[str, str]]) -> list[str]:
    """Names of conditions in which any environment differs from the first; options by their own names."""
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
    """``names``, if all are in ENVIRONMENT. Raises UnknownNameError otherwise."""
    for name in names:
        if name not in ENVIRONMENT:
            raise UnknownNameError("environment key", name, ENVIRONMENT)
    return tuple(names)
