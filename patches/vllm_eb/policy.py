"""Policy names as a user writes them: ``v0``, ``v1``, ``deferred:k=32``, ``eb:theta=0.5``, ``eb``, ``ebplus``.

Further settings follow as ``key=value`` pairs, e.g. ``ebplus:margin=1e-5,estimator=censored``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal

THETA_MIN, THETA_MAX = 0.01, 0.80  # the authors' clip of the online threshold

Kind = Literal["v0", "v1", "cadence", "deferred", "eb", "ebplus", "marginal"]
Estimator = Literal["published", "censored"]


class PolicyError(ValueError):
    """A policy string that cannot be understood; the message says what to write instead."""


@dataclass(frozen=True)
class PolicySpec:
    """One scheduling policy with its settings (defaults: theory.md sections 5, 7 and 8).

    ``k`` and ``theta`` fix the threshold (slots, share of N); both None means: computed online (Algorithm 1).
    ``every`` is cadence's interval in steps. ``margin`` is EB+'s priority margin delta in s/token; None takes the
    device's published default. It leaves exclusive batches when they lag by ``sticky`` times its size (with -1 and a
    negative margin: at every chance).
    """

    kind: Kind
    k: int | None = None
    theta: float | None = None
    every: int | None = None
    margin: float | None = None
    sticky: float = 3.0
    estimator: Estimator = "published"
    window: int = 500  # W, completions kept by the estimator
    update_every: int = 100  # M, completions between updates
    min_samples: int = 30
    initial_theta: float = 0.70
    theta_min: float = THETA_MIN  # lowest threshold the online controller may choose
    epsilon: float = 0.01
    kv_gate: bool = True
    mix: bool = True  # marginal: refill beside decodes where that is cheaper; off: exclusive batches only
    ttft: float | None = None  # marginal: target in seconds
    tpot: float | None = None  # marginal: target in seconds
    memory_safe: bool = True  # bound N by the memory-safe batch
    memory_form: Literal["code", "paper"] = "code"

    @property
    def name(self) -> str:
        """The canonical string; parsing it again gives the same policy."""
        default = PolicySpec(self.kind)
        pairs = [
            f"{f.name}={_text(getattr(self, f.name))}"
            for f in fields(self)
            if f.name != "kind" and getattr(self, f.name) != getattr(default, f.name)
        ]
        return self.kind + (":" + ",".join(pairs) if pairs else "")


_DESCRIPTIONS: Mapping[str, str] = {
    "v0": "exclusive batches, refill as soon as one slot is free (vLLM v0's rule)",
    "v1": "mixed batches: vLLM v1, untouched",
    "cadence": "mixed batches, prompts only in every Nth step (vLLM 0.33's --prefill-schedule-interval); every=N",
    "deferred": "exclusive batches, refill after K departures (Mohanty et al., EuroMLSys 2025); needs k=K",
    "eb": "exclusive batches, k* and N* computed online (Zhang et al., ICML 2026); k= or theta= fixes it",
    "ebplus": "switches online between mixed and exclusive batches at the predicted crossover",
    "marginal": "refills when one more decode step would cost more, mixed or exclusive as measured costs say; "
    "ttft= and tpot= (seconds) are met first",
}


_ESTIMATED = (
    "estimator", "window", "update_every", "min_samples", "initial_theta", "theta_min", "epsilon", "kv_gate",
    "memory_safe", "memory_form",
)  # fmt: skip
_FOLLOWED = ("update_every", "kv_gate")  # the KV gate goes by answer lengths, whatever sets the threshold
_OF_THE_BOUND = ("epsilon", "memory_form")
_TAKES: Mapping[str, tuple[str, ...]] = {
    "v0": (),
    "v1": (),
    "cadence": ("every",),
    "deferred": ("k",),
    "eb": ("k", "theta", *_ESTIMATED),
    "ebplus": ("margin", "sticky", *_ESTIMATED),
    "marginal": ("mix", "ttft", "tpot", "window", "update_every"),
}


_NEEDS: Mapping[str, tuple[str, int]] = {"deferred": ("k", 32), "cadence": ("every", 8)}
"""Settings without which a kind means nothing, and a number to begin with."""


def example(kind: str) -> str:
    """A policy of this kind with what it needs."""
    return "{}:{}={}".format(kind, *_NEEDS[kind]) if kind in _NEEDS else kind


def takes(spec: PolicySpec) -> tuple[str, ...]:
    """Names of the settings that this policy heeds."""
    idle = _without_effect(spec)
    return tuple(key for key in _TAKES[spec.kind] if key not in idle)


def _without_effect(spec: PolicySpec) -> Mapping[str, str]:
    """Settings that another one leaves nothing to do, with that other one."""
    idle = dict.fromkeys(_OF_THE_BOUND, "memory_safe=false") if not spec.memory_safe else {}
    fixed = next((key for key in ("k", "theta") if getattr(spec, key) is not None), None)
    if fixed is not None:
        others = {"k", "theta", *_ESTIMATED} - {fixed, *_FOLLOWED}
        idle |= dict.fromkeys(others, f"{fixed}={getattr(spec, fixed)}")
    return idle


def descriptions() -> Mapping[str, str]:
    """One line per policy kind."""
    return _DESCRIPTIONS


def parse_policy(text: str) -> PolicySpec:
    """Parse a policy string. Raises PolicyError with the remedy."""
    kind, _, rest = text.strip().partition(":")
    if kind not in _DESCRIPTIONS:
        raise PolicyError(f"unknown policy {kind!r}; known: {', '.join(_DESCRIPTIONS)}")
    spec = PolicySpec(kind)  # type: ignore[arg-type]
    for pair in filter(None, (part.strip() for part in rest.split(","))):
        spec = _with_setting(spec, pair)
    return _checked(spec)


def policy_from_mapping(settings: Mapping[str, object]) -> PolicySpec:
    """Build a policy from typed configuration (the plugin's ``--additional-config``). Raises PolicyError."""
    kind = settings.get("kind")
    pairs = ",".join(f"{key}={_text(value)}" for key, value in settings.items() if key != "kind")
    return parse_policy(f"{kind}:{pairs}")


def _with_setting(spec: PolicySpec, pair: str) -> PolicySpec:
    key, eq, value = pair.partition("=")
    if not eq or key not in _PARSERS:
        keys = takes(spec)
        remedy = f"is not key=value with a key of {', '.join(keys)}" if keys else "is too much: it takes no settings"
        raise PolicyError(f"policy {spec.kind}: {pair!r} {remedy}")
    try:
        return replace(spec, **{key: _PARSERS[key](value)})  # type: ignore[arg-type]
    except ValueError as error:
        raise PolicyError(f"policy {spec.kind}: {key}={value!r} is not valid ({error})") from None


def _choice(*options: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in options:
            raise ValueError(f"one of {', '.join(options)}")
        return text

    return parse


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false", "on", "off", "1", "0"):
        raise ValueError("true or false")
    return text.lower() in ("true", "on", "1")


_PARSERS: Mapping[str, Callable[[str], object]] = {
    "k": int, "theta": float, "every": int, "margin": float, "sticky": float, "window": int, "update_every": int,
    "min_samples": int, "initial_theta": float, "theta_min": float, "epsilon": float, "kv_gate": _flag,
    "memory_safe": _flag, "mix": _flag, "ttft": float, "tpot": float,
    "estimator": _choice("published", "censored"), "memory_form": _choice("code", "paper"),
}  # fmt: skip


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _checked(spec: PolicySpec) -> PolicySpec:
    if (needed := _NEEDS.get(spec.kind)) is not None and getattr(spec, needed[0]) is None:
        raise PolicyError(f"policy {spec.kind} needs {needed[0]}=: write {example(spec.kind)}")
    _refuse_ignored(spec)
    if spec.k is not None and spec.theta is not None:
        raise PolicyError("give k or theta, not both")
    _refuse_idle(spec)
    for key in ("k", "every"):
        if getattr(spec, key) is not None and getattr(spec, key) < 1:
            raise PolicyError(f"{key} must be at least 1, not {getattr(spec, key)}")
    for key in ("ttft", "tpot"):
        value = getattr(spec, key)
        if value is not None and not 0 < value < float("inf"):
            raise PolicyError(f"{key} must be a positive number of seconds, not {value}")
    for key in ("theta", "initial_theta", "theta_min", "epsilon"):
        value = getattr(spec, key)
        if value is not None and not 0 < value < 1:
            raise PolicyError(f"{key} must lie strictly between 0 and 1, not {value}")
    if spec.theta_min > THETA_MAX:
        raise PolicyError(f"theta_min must be at most {THETA_MAX}, the highest threshold, not {spec.theta_min}")
    for key in ("margin", "sticky"):
        value = getattr(spec, key)
        if value is not None and not math.isfinite(value):
            raise PolicyError(f"{key} must be a finite number, not {value}")
    for key in ("window", "update_every", "min_samples"):
        if getattr(spec, key) < 1:
            raise PolicyError(f"{key} must be at least 1, not {getattr(spec, key)}")
    return spec


def _refuse_ignored(spec: PolicySpec) -> None:
    """Raise PolicyError for a setting that this kind would not heed."""
    keys = _TAKES[spec.kind]
    for key in _set(spec):
        if key in keys:
            continue
        others = ", ".join(kind for kind, theirs in _TAKES.items() if key in theirs)
        it = f"it takes {', '.join(keys)}" if keys else "it takes no settings"
        raise PolicyError(f"policy {spec.kind} does nothing with {key}=, which is for {others}; {it}")


def _refuse_idle(spec: PolicySpec) -> None:
    """Raise PolicyError for a setting of this kind that another one leaves nothing to do."""
    idle = _without_effect(spec)
    for key in _set(spec):
        if key in idle:
            it = f"there it takes {', '.join(takes(spec))}"
            raise PolicyError(f"policy {spec.kind} does nothing with {key}= beside {idle[key]}; {it}")


def _set(spec: PolicySpec) -> list[str]:
    """Settings that differ from their default."""
    default = PolicySpec(spec.kind)
    return [key for key in _PARSERS if getattr(spec, key) != getattr(default, key)]
