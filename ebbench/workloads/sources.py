"""Requests of a workload from its source: a data set (:mod:`ebbench.workloads.data_sets`), a fit, or its profile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from ebbench.errors import UnknownNameError, UsageError
from ebbench.records.warnings import RunWarning, warning
from ebbench.traffic.arrivals import substream
from ebbench.workloads.requests import Int64s, Requests, single_turn, with_history
from ebbench.workloads.spec import Profile, Selection, Turns, WorkloadSpec


def draw_requests(profile: Profile, sessions: int, seed: int, part: str = "") -> Requests:
    """Draw ``sessions`` sessions. ``part``: name of a scenario phase, which gets its own random substream."""
    turns = substream(seed, f"content/turns{part}")
    rounds = np.ones(sessions, np.int64) if profile.turns is None else draw_rounds(profile.turns, turns, sessions)
    n = int(rounds.sum())
    inputs = profile.input.draw(substream(seed, f"content/input{part}"), n)
    outputs = profile.output.draw(substream(seed, f"content/output{part}"), n)
    if profile.turns is None:
        return single_turn(inputs, outputs)
    return with_history(rounds, inputs, outputs)


def draw_rounds(turns: Turns, rng: np.random.Generator, sessions: int) -> Int64s:
    """Rounds per session: ``min`` plus a geometric number, capped at ``max``; shape (sessions,)."""
    if turns.min == turns.max:
        return np.full(sessions, turns.min)
    go_on = continuation(turns)
    if go_on == 0.0:
        return np.full(sessions, turns.min)
    more = rng.geometric(1.0 - go_on, size=sessions) - 1 if go_on < 1.0 else turns.max
    return np.minimum(turns.min + more, turns.max).astype(np.int64) * np.ones(sessions, np.int64)


def continuation(turns: Turns) -> float:
    """Probability of one more round such that the mean after the cap is ``turns.mean``.

    The mean of ``min(min + G, max)`` is ``min + q + q^2 + ... + q^(max-min)``, which increases with q: solved by
    bisection.
    """
    powers = np.arange(1, turns.max - turns.min + 1)
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if turns.min + float((middle**powers).sum()) < turns.mean:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def gather(workload: WorkloadSpec, profile: Profile, source: str, selection: Selection) -> Requests:
    """Requests from ``source`` (auto, hub, file:PATH, profile); their facts name the source and the reason.

    Raises UsageError, InputFileError, RunError (``hub`` that cannot be read).
    """
    _check(workload, source, selection)
    if source.startswith("file:"):
        from ebbench.workloads.data_sets import from_file

        return from_file(workload, Path(source.removeprefix("file:")).expanduser(), selection)
    if source == "hub":
        from ebbench.workloads.data_sets import from_hub

        return from_hub(workload, selection)
    if workload.fitted is not None and not selection.lengths_set:
        from ebbench.workloads.fitted import draw_fitted

        facts = {"source": "fitted", "source_reason": f"distributions in the file of {workload.name}"}
        drawn = draw_fitted(workload.fitted, selection.sessions, selection.seed, selection.rate_scale)
        return replace(drawn, facts=facts)
    if source == "profile":
        return _from_profile(profile, selection, "asked for")
    if workload.records is None:
        return _from_profile(profile, selection, "synthetic workload")
    if selection.lengths_set:
        return _from_profile(profile, selection, "lengths were set")
    if workload.hub is None:
        return _from_profile(profile, selection, "the workload's file names no data set on the hub")
    from ebbench.workloads.data_sets import UnreadableError, read_hub

    try:
        return read_hub(workload, selection)
    except UnreadableError as error:
        published = warning("published-lengths", workload=workload.name, why=str(error))
        return _from_profile(profile, selection, str(error), (published,))


def _check(workload: WorkloadSpec, source: str, selection: Selection) -> None:
    kind = "file" if source.startswith("file:") else source
    if kind not in ("auto", "hub", "file", "profile") or source == "file:":
        raise UnknownNameError("source", source, ["auto", "hub", "file:PATH", "profile"])
    if kind not in ("hub", "file"):
        return
    if workload.records is None or (kind == "hub" and workload.hub is None):
        missing = "[records]" if workload.records is None else "[hub]"
        raise UsageError(f"workload {workload.name!r} has no {missing} in its file; leave out --source {source}")
    if selection.lengths_set:
        raise UsageError(f"lengths cannot be set for the records of --source {source}; leave one of them out")


def _from_profile(
    profile: Profile, selection: Selection, reason: str, warnings: tuple[RunWarning, ...] = ()
) -> Requests:
    requests = draw_requests(profile, selection.sessions, selection.seed)
    facts = {
        "source": "profile",
        "source_reason": reason,
        "input_lengths": profile.input.text,
        "output_lengths": profile.output.text,
    }
    return replace(requests, facts=facts, warnings=warnings)
