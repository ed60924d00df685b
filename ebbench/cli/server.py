"""What differs when the engine is somebody's server instead of one that ebbench sets up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from ebbench.devices.base import Device, StepShape
from ebbench.errors import UsageError
from ebbench.records.journal import Journal
from ebbench.records.manifest import RunWarning
from ebbench.records.run import RunWriter
from vllm_eb.calibration import Calibration

if TYPE_CHECKING:
    from ebbench.engines.base import Engine
    from ebbench.records.plan import Plan

POLICY_IS_A_LABEL = RunWarning(
    "policy-is-a-label",
    "The server schedules by its own settings; the policy is only the label of this run.",
    "Give the policy it was started with as --policy.",
)


class _NoCost:
    """A server is measured, not predicted."""

    def step_s(self, shape: StepShape) -> float:
        """Never asked for: engines that measure have no cost model."""
        raise RuntimeError("a server has no cost model")


def unknown_device(device: str | None, model: str | None) -> Device:
    """A device of which only what the user says is known."""
    nothing = Calibration(alpha_p=1.0, beta_p=1.0, alpha_d=1.0, beta_d=1.0, source="none: a server")
    return Device(device or "unknown", model or "unknown", _NoCost(), 0, nothing, "a server, measured from outside")


def for_server(engine: Engine, model: str | None, plan_settings: Mapping[str, object]) -> Engine:
    """The engine with the command line's model and length limit, where it is one that talks to a server."""
    from ebbench.engines.endpoint import EndpointEngine

    if not isinstance(engine, EndpointEngine):
        return engine
    limit = plan_settings["max_model_len"]
    options = replace(
        engine.options,
        model=model,
        max_model_len=limit if isinstance(limit, int) else None,
        drop_too_long=bool(plan_settings["drop_too_long"]),
    )
    return replace(engine, options=options)


def with_client(engine: Engine, settings: Mapping[str, object]) -> Engine:
    """The engine with the load generator's options that were given. Raises UsageError where it has none."""
    given = [name for name, value in settings.items() if value is not None]
    if not given:
        return engine
    from ebbench.cli.client_flags import client_options
    from ebbench.client import ClientOptions

    for name in ("options", "client"):
        base = getattr(engine, name, None)
        if isinstance(base, ClientOptions):
            changes: dict[str, Any] = {name: client_options(base, settings)}
            return replace(engine, **changes)  # type: ignore[type-var]
    flag = "--" + given[0].removesuffix("_s").replace("_", "-")
    raise UsageError(f"{flag} is about sending requests, which engine {engine.name} does not; give a server's URL")


def with_ramp(plan: Plan, engine: Engine, ramp_up_s: float | None) -> tuple[Plan, Engine]:
    """Plan and engine with a ramp of so many seconds; None is none. Raises UsageError where there can be none."""
    from ebbench.client import ClientOptions
    from ebbench.client.ramp import ramped

    if ramp_up_s is None:
        return plan, engine
    for name in ("options", "client"):
        base = getattr(engine, name, None)
        if isinstance(base, ClientOptions):
            plan, options = ramped(plan, base, ramp_up_s)
            changes: dict[str, Any] = {name: options}
            return plan, replace(engine, **changes)  # type: ignore[type-var]
    if plan.closed_loop:
        raise UsageError(f"--ramp-up of a closed loop needs a server; engine {engine.name} fills its slots at once")
    return ramped(plan, ClientOptions(), ramp_up_s)[0], engine


def journalled(engine: Engine, writer: RunWriter) -> Engine:
    """The engine storing finished requests as they come, where it can tell (a field ``on_batch``)."""
    names: set[str] = {field.name for field in fields(engine)} if is_dataclass(engine) else set()
    if "on_batch" not in names:
        return engine
    changes: dict[str, Any] = {"on_batch": Journal(writer, "requests").add}
    if "log" in names:
        changes["log"] = writer.path / "server.log"
    return replace(engine, **changes)  # type: ignore[type-var]
