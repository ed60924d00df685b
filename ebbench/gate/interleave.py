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

from ebbench.errors import RunError, UsageError
from ebbench.process.child import run_supervised
from ebbench.records import files
from ebbench.records.manifest import Manifest
from ebbench.records.run import MANIFEST, find_runs, read_manifest, unused

GRACE_S = 60.0
"""Time for an interrupted command to finish its requests and store its measurements."""
MOST_TRIES = 3
"""Runs of one command in a pair: an INVALID one, such as of a client that was late, is measured again."""
COMMAND = "gate-command.txt"
"""File beside a side's runs with the command that made them."""
_KEPT_LINES = 5


@dataclass(frozen=True)
class Side:
    """Directory of a side's runs, and its command: ``{out}`` is the run directory, ``{seed}`` the pair's seed."""

    directory: Path
    command: str

    def run(self, pair: int) -> Path:
        """Directory of a pair's run, named as messages count pairs: ``pair-001`` is the first, ``pair`` 0."""
        return self.directory / f"pair-{pair + 1:03d}"

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
    check: Callable[[], None] = lambda: None,
    decided: Callable[[int], bool] = lambda _: False,
) -> None:
    """Run both sides' commands, pair by pair; a pair of which a valid run is stored is not measured again.

    ``check`` is called before anything is measured and after every pair; it raises if the stored runs cannot be
    compared. ``decided`` is called after every pair with the number of pairs; True ends the measurement. Raises
    UsageError for an invalid command and for stored runs of another command or seed, RunError if a command fails or
    gives INVALID runs only.
    """
    if pairs < 1:
        raise UsageError(f"at least 1 pair must be measured, not {pairs}")
    sides = (baseline, candidate)
    for side in sides:
        _check_stored(side, pairs, first_seed)
    check()
    for side in sides:
        side.directory.mkdir(parents=True, exist_ok=True)
        files.write_text(side.command + "\n", side.directory / COMMAND)
    for runs, (pair, which) in enumerate(abba(pairs), start=1):
        side = sides[which]
        label = f"pair {pair + 1}, {('baseline', 'candidate')[which]}"
        out = side.run(pair)
        if any(manifest.valid for manifest in _stored(out)):
            say(f"{label}: measured before")
        else:
            say(label)
            _measure(side, out, first_seed + pair, label, say)
        if runs % 2 == 0:
            check()
            if decided(pair + 1):
                return


def _check_stored(side: Side, pairs: int, first_seed: int) -> None:
    """Raise UsageError for an invalid command, and for stored pairs of another command or seed than this one's."""
    side.argv(side.directory, 0)
    valid = [(pair, one) for pair in range(pairs) for one in _stored(side.run(pair)) if one.valid]
    known = side.directory / COMMAND
    if valid and known.exists() and (before := known.read_text(encoding="utf-8").strip()) != side.command.strip():
        raise UsageError(
            f"{side.directory} holds pairs measured with another command, {before!r}; give that one, or another "
            "directory"
        )
    if "{seed}" in side.command:
        for pair, manifest in valid:
            if manifest.seed != first_seed + pair:
                raise UsageError(
                    f"{side.run(pair)} was measured with seed {manifest.seed}, and --seed {first_seed} makes it "
                    f"{first_seed + pair}; give --seed {manifest.seed - pair}, or another directory"
                )


def _stored(out: Path) -> list[Manifest]:
    """The manifests of a pair's runs, oldest first; one that is measured again has a number after its name."""
    places = [path for path in find_runs([out, *out.parent.glob(f"{out.name}-*")]) if (path / MANIFEST).exists()]
    return sorted((read_manifest(path) for path in places), key=lambda manifest: manifest.anchor_unix_ns)


def _measure(side: Side, out: Path, seed: int, label: str, say: Callable[[str], None]) -> None:
    """Run the command until it has stored a valid run, MOST_TRIES times at most."""
    for trial in range(1, MOST_TRIES + 1):
        before = len(_stored(out))
        argv = side.argv(unused(out), seed)
        status, tail = _run(argv)
        stored = _stored(out)
        if len(stored) == before:
            ended = f"ended with exit code {status}: {tail}" if status else f"stored no run in {out}"
            raise RunError(f"{shlex.join(argv)} {ended}")
        if stored[-1].valid and not status:
            return
        if stored[-1].valid or stored[-1].interrupted:
            raise RunError(f"{shlex.join(argv)} ended with exit code {status}: {tail}")
        reasons = "; ".join(map(str, stored[-1].reasons))
        if trial < MOST_TRIES:
            say(f"{label}: INVALID run ({reasons}), measured again")
    raise RunError(f"{label}: {MOST_TRIES} INVALID runs, the last one since {reasons}; the same command tries again")


def _run(argv: list[str]) -> tuple[int, str]:
    """The exit status of a command and the last lines that it wrote to stderr. Raises UsageError if it is unknown."""
    try:
        status, said = run_supervised(argv, GRACE_S, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    except OSError as error:
        raise UsageError(f"cannot start {argv[0]!r}: {error.strerror or error}") from None
    return status, " / ".join(said.strip().splitlines()[-_KEPT_LINES:]) or "no output"
