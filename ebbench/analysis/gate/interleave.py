"""Measures two sides alternately: baseline, candidate, candidate, baseline, ... (ABBA), pair by pair.

Machine drift during the measurement (temperature, clocks, other load) then affects both sides equally. A side is a
command line that stores one run, so the sides may be two installations, branches or settings.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ebbench.child import run_supervised
from ebbench.errors import RunError, UsageError
from ebbench.records.run import MANIFEST, unused

GRACE_S = 60.0
"""Time for an interrupted command to finish its requests and store its measurements."""
_KEPT_LINES = 5


@dataclass(frozen=True)
class Side:
    """Directory of a side's runs, and its command: ``{out}`` is the run directory, ``{seed}`` the pair's seed."""

    directory: Path
    command: str

    def argv(self, out: Path, seed: int) -> list[str]:
        """The command of one run as arguments. Raises UsageError if it cannot be split or lacks ``{out}``."""
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            raise UsageError(f"cannot split the command {self.command!r}: {error}") from None
        if not any("{out}" in word for word in words):
            raise UsageError(f"the command {self.command!r} needs {{out}}, the directory its run must be stored in")
        return [word.replace("{out}", str(out)).replace("{seed}", str(seed)) for word in words]


def abba(pairs: int) -> Iterator[tuple[int, int]]:
    """(pair, side) in order of measurement: side 0 first in even pairs, side 1 in odd ones."""
    for pair in range(pairs):
        for side in (0, 1) if pair % 2 == 0 else (1, 0):
            yield pair, side


def measure_pairs(
    baseline: Side,
    candidate: Side,
    *,
    pairs: int,
    first_seed: int,
    say: Callable[[str], None],
    decided: Callable[[int], bool] = lambda _: False,
) -> None:
    """Run both sides' commands, pair by pair; a pair that is already stored is not measured again.

    ``decided`` is called after every pair with the number of pairs; True ends the measurement. Raises UsageError for an
    invalid command, RunError if a command fails.
    """
    if pairs < 1:
        raise UsageError(f"at least 1 pair must be measured, not {pairs}")
    sides = (baseline, candidate)
    for side in sides:
        side.argv(side.directory, 0)
        side.directory.mkdir(parents=True, exist_ok=True)
    for runs, (pair, which) in enumerate(abba(pairs), start=1):
        side = sides[which]
        label = f"pair {pair + 1} of at most {pairs}, {('baseline', 'candidate')[which]}"
        out = side.directory / f"pair-{pair:03d}"
        if _measured(out):
            say(f"{label}: measured before")
        else:
            say(label)
            _run(side.argv(unused(out), first_seed + pair))
        if runs % 2 == 0 and decided(pair + 1):
            return


def _measured(out: Path) -> bool:
    """Whether a run of the pair is stored; a run repeated after an interrupted one has a number after its name."""
    return any((run / MANIFEST).exists() for run in (out, *out.parent.glob(f"{out.name}-*")))


def _run(argv: list[str]) -> None:
    try:
        status, said = run_supervised(argv, GRACE_S, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    except OSError as error:
        raise UsageError(f"cannot start {argv[0]!r}: {error.strerror or error}") from None
    if status:
        tail = " / ".join(said.strip().splitlines()[-_KEPT_LINES:])
        raise RunError(f"{shlex.join(argv)} ended with exit code {status}: {tail or 'no output'}")
