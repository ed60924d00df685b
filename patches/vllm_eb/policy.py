"""Scheduling policies as text: ``v1``, ``deferred:k=32``, ``eb:theta=0.5``, ``ebplus:margin=1e-5``.

A policy is a module with one subclass of :class:`PolicySpec` under the name ``POLICY``: its settings and its decisions
(:meth:`PolicySpec.strategy`). Modules in :mod:`vllm_eb.policies` are named by their file; any other importable module
by its dotted name, for example ``mypackage.early:slots=4``.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from vllm_eb.settings import (
    GivenValueError,
    Setting,
    SettingError,
    UnknownSettingError,
    check_value,
    name_hint,
    read_settings,
    split_kind,
    text_of,
)
from vllm_eb.settings import setting as setting
from vllm_eb.settings import settings_of as settings_of

if TYPE_CHECKING:
    from vllm_eb.strategy import EngineFacts, Lengths, Strategy, Values

BUILT_IN = "vllm_eb.policies"


class PolicyError(GivenValueError):
    """An invalid policy string; the message says what to write instead."""


class UnknownPolicyError(PolicyError):
    """A policy name that does not exist."""


@dataclass(frozen=True, kw_only=True)
class PolicySpec:
    """One scheduling policy with its settings. Subclasses are frozen dataclasses whose fields are made with
    ``setting``.

    Raises PolicyError for settings that are out of range or have no effect.
    """

    kind: ClassVar[str] = ""
    """The policy's name: the module's file name, or its dotted name outside :mod:`vllm_eb.policies`."""
    description: ClassVar[str]
    """One line for ``ebbench policies list``."""
    aligns_ranks: ClassVar[bool] = False
    """Whether data-parallel ranks in lockstep refill in the same passes, for which they need the number of the pass."""

    order: Literal["fcfs", "shortest"] = setting(
        "fcfs", "of waiting requests: fcfs, as they came, or shortest, by the tokens of their prompts"
    )

    def __init_subclass__(cls) -> None:
        cls.kind = cls.__module__.removeprefix(BUILT_IN + ".")

    def __post_init__(self) -> None:
        for name, about in settings_of(type(self)).items():
            try:
                check_value(name, getattr(self, name), about)
            except SettingError as error:
                raise PolicyError(str(error)) from None
        self.check()
        idle = self.ineffective_settings()
        for name in self.given():
            if name in idle:
                raise PolicyError(
                    f"policy {self.kind} ignores {name}= with {idle[name]}; it then uses "
                    f"{', '.join(settings_in_effect(self))}"
                )

    @property
    def name(self) -> str:
        """The canonical string; parsing it gives an equal policy."""
        pairs = [f"{name}={text_of(getattr(self, name))}" for name in self.given()]
        return self.kind + (":" + ",".join(pairs) if pairs else "")

    @property
    def native(self) -> bool:
        """Whether vLLM schedules by itself, without a controller."""
        return False

    @property
    def orders_queue(self) -> bool:
        """Whether it puts waiting requests into an order of its own; vLLM must not order them by priority then."""
        return self.order != "fcfs"

    @property
    def completions_per_update(self) -> int:
        """Completions between two updates of the mean lengths."""
        return 100

    @property
    def varies_drafts(self) -> bool:
        """Whether it says how many tokens the server drafts; vLLM must then be prepared for lengths that vary."""
        return False

    @property
    def needs_costs(self) -> bool:
        """Whether it uses the device's calibration."""
        return False

    @property
    def adapts(self) -> bool:
        """Whether it sets its threshold and batch size itself during a run."""
        return False

    def check(self) -> None:
        """Raise PolicyError for settings that contradict each other."""

    def ineffective_settings(self) -> Mapping[str, str]:
        """Settings that another setting makes ineffective, each with that other setting."""
        return {}

    def load_doubt(self, open_at_most: int, max_num_seqs: int) -> tuple[str, Values] | None:
        """Why the policy does not do what it is for with at most ``open_at_most`` open requests (0: any number).

        A code and the values it rests on; None if there is no doubt.
        """
        return None

    def strategy(self, engine: EngineFacts, lengths: Lengths) -> Strategy:
        """The strategy for one engine instance; ``lengths`` are those of the requests so far.

        Raises PolicyError if the policy has none: under v1 vLLM schedules by itself.
        """
        raise PolicyError(f"policy {self.kind} has no strategy: vLLM schedules by itself under it")

    def given(self) -> list[str]:
        """Names of settings that differ from their default."""
        return [name for name, about in settings_of(type(self)).items() if getattr(self, name) != about.default]


@lru_cache(maxsize=1)
def policy_names() -> tuple[str, ...]:
    """The names of this package's policies in alphabetical order. Imports none of them."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(importlib.import_module(BUILT_IN).__path__)))


def policy_types() -> Mapping[str, type[PolicySpec]]:
    """The policies of this package by name, in alphabetical order."""
    return {name: _policy_of(f"{BUILT_IN}.{name}") for name in policy_names()}


def _policy_of(module: str) -> type[PolicySpec]:
    policy = getattr(importlib.import_module(module), "POLICY", None)
    if not (isinstance(policy, type) and issubclass(policy, PolicySpec)):
        raise PolicyError(f"module {module} is not a policy: it has no subclass of PolicySpec under the name POLICY")
    return policy


def _reach_working_directory(package: str) -> None:
    """Put the working directory at the end of the import path if a package is there and nowhere else.

    The installed programs, ``ebbench`` and ``vllm``, do not look there by themselves.
    """
    here = str(Path.cwd())
    elsewhere = package in sys.modules or importlib.util.find_spec(package) is not None
    if not elsewhere and PathFinder.find_spec(package, [here]) is not None:
        sys.path.append(here)


def import_root(spec: PolicySpec) -> str | None:
    """The folder from which a policy of the user is imported; None for those of this package."""
    package = type(spec).__module__.partition(".")[0]
    places = getattr(sys.modules[package], "__path__", None)
    if package == __name__.partition(".")[0] or not places:
        return None
    return str(Path(next(iter(places))).parent)


def policy_class(kind: str) -> type[PolicySpec]:
    """The policy class of that name. Raises PolicyError with the known names."""
    if kind in policy_names():
        return _policy_of(f"{BUILT_IN}.{kind}")
    if "." in kind and all(part.isidentifier() for part in kind.split(".")):
        _reach_working_directory(kind.partition(".")[0])
        try:
            return _policy_of(kind)
        except ImportError as error:
            raise PolicyError(f"policy {kind!r} cannot be imported: {error}") from None
    raise UnknownPolicyError(
        f"unknown policy {kind!r}; {name_hint(kind, policy_names())}; your own: its dotted name, package.module, "
        "importable from the working directory or PYTHONPATH"
    )


def example(kind: str) -> str:
    """A policy of this kind with its required settings."""
    needed = {name: about.example for name, about in settings_of(policy_class(kind)).items() if about.required}
    return kind + (":" + ",".join(f"{name}={value}" for name, value in needed.items()) if needed else "")


def settings_in_effect(spec: PolicySpec) -> tuple[str, ...]:
    """Names of the settings that have an effect in combination with the others."""
    idle = spec.ineffective_settings()
    return tuple(name for name in settings_of(type(spec)) if name not in idle)


def least_seqs(spec: PolicySpec) -> int:
    """The smallest max_num_seqs that the policy supports: its largest setting in slots."""
    slots = (getattr(spec, name) for name, about in settings_of(type(spec)).items() if about.unit == "slots")
    return max((value for value in slots if value is not None), default=1)


def least_tokens(spec: PolicySpec) -> int:
    """The smallest max_num_batched_tokens that the given settings make sense with: a budget of its own fits.

    A default that is larger than the engine's budget has no effect, and is not refused.
    """
    about = settings_of(type(spec))
    own = (getattr(spec, name) for name in spec.given() if about[name].unit == "tokens per step")
    return max((value for value in own if value is not None), default=1)


def descriptions() -> Mapping[str, str]:
    """One line per policy, by name."""
    return {name: kind.description for name, kind in policy_types().items()}


def parse_policy(text: str) -> PolicySpec:
    """Parse ``NAME[:key=value,...]``. Raises PolicyError with the remedy."""
    kind, rest = split_kind(text)
    policy = policy_class(kind)
    known = settings_of(policy)
    try:
        values = read_settings(rest, known, f"policy {kind}")
    except UnknownSettingError as error:
        raise PolicyError(_not_a_setting(kind, error, known)) from None
    except SettingError as error:
        raise PolicyError(str(error)) from None
    for key, about in known.items():
        if about.required and key not in values:
            raise PolicyError(f"policy {kind} needs {key}=: write {example(kind)}")
    return policy(**values)


def known_policy(text: str) -> PolicySpec | None:
    """The policy of that name; None if it is only a label, as for a run against an external server."""
    try:
        return parse_policy(text)
    except PolicyError:
        return None


def policy_from_mapping(settings: Mapping[str, object]) -> PolicySpec:
    """A policy from typed configuration (the plugin's ``--additional-config``). Raises PolicyError."""
    kind = settings.get("kind")
    pairs = ",".join(f"{key}={text_of(value)}" for key, value in settings.items() if key != "kind")
    return parse_policy(f"{kind}:{pairs}")


def _not_a_setting(kind: str, error: UnknownSettingError, known: Mapping[str, Setting]) -> str:
    others = ", ".join(name for name, other in policy_types().items() if error.name in settings_of(other))
    if not others:
        return str(error)
    it = f"it takes {', '.join(known)}" if known else "it takes no settings"
    return f"policy {kind} has no setting {error.name}=, which belongs to {others}; {it}"
