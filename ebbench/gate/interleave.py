"""Measures two sides alternately: baseline, candidate, candidate, baseline, ... (ABBA), pair by pair.

Machine drift during the measurement (temperature, clocks, other load) then affects both sides equally. A side is a
command line that stores one run, so the sides may be two installations, branches or settings.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ebbench.analysis.environment import check_allowed
from ebbench.analysis.units import GateUnit, load_units, of_policy, require_separate_runs, valid_units
from ebbench.analysis.verdict import (
    MAX_PAIRS,
    Rules,
    Verdict,
    judge,
    left_out,
    pair_units,
    pairs_needed,
    require_comparable,
)
from ebbench.errors import DataError, RunError, UsageError
from ebbench.gate.baselines import stored_units
from ebbench.gate.verdicts import VERDICTS, VerdictFiles
from ebbench.grouping import alternating
from ebbench.process.child import run_supervised
from ebbench.records import files
from ebbench.records.files import sole_use
from ebbench.records.manifest import Manifest
from ebbench.records.run import MANIFEST, Run, find_runs, read_manifest, unused
from ebbench.records.warnings import counted
from ebbench.render.documents import Console
from ebbench.render.live import Work, shown
from ebbench.runs.stored import run_paths

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


@dataclass(frozen=True)
class PairsWanted:
    """Pairs to measure with the commands of both sides: exactly ``pairs``, or ``max_pairs`` at most until the verdict
    is known. Raises UsageError for values that cannot be combined."""

    pairs: int | None = None
    max_pairs: int | None = None
    baseline_command: str | None = None
    candidate_command: str | None = None
    first_seed: int = 0

    def __post_init__(self) -> None:
        if self.pairs is not None and self.max_pairs is not None:
            raise UsageError("give --pairs (exactly so many) or --max-pairs (until the answer is known), not both")
        for name, count in (("--pairs", self.pairs), ("--max-pairs", self.max_pairs)):
            if count is not None and count < 1:
                raise UsageError(f"{name} must be at least 1, not {count}")
        if self.given and (self.baseline_command is None or self.candidate_command is None):
            raise UsageError("measuring needs both --baseline-command and --candidate-command")

    @property
    def given(self) -> bool:
        """Whether pairs are to be measured."""
        return self.pairs is not None or bool(self.baseline_command or self.candidate_command)

    @property
    def sequential(self) -> bool:
        """Whether pairs are judged after each of them, which is the case unless their number is fixed."""
        return self.max_pairs is not None or (self.given and self.pairs is None)


def policies_of_sides(names: Sequence[str]) -> tuple[str | None, str | None]:
    """The baseline's and the candidate's policy; None: the only one there is. Raises UsageError for more than two."""
    if len(names) > 2:
        raise UsageError(f"--policy may be given twice, for the baseline and for the candidate, not {len(names)}x")
    return (names[0], names[-1]) if names else (None, None)


@dataclass(frozen=True)
class GateSides:
    """The two sides (directories, or names of runs), what may differ between them, and the rules."""

    baseline: Path
    candidate: Path
    rules: Rules
    allow: tuple[str, ...] = ()
    policies: tuple[str | None, str | None] = (None, None)
    tell: Callable[[str], object] = lambda _line: None

    def judged(self, *, with_detectable: bool = True) -> Verdict:
        """The verdict on the existing runs. Raises DataError, UsageError."""
        allowed = check_allowed(self.allow)
        ours, _ = self.policies
        stored = self.baseline.is_file() or self.baseline.suffix == ".parquet"
        before = [] if stored else load_units(run_paths([self.baseline], self.tell))
        after = load_units(run_paths([self.candidate], self.tell))
        before, after = self._of_policies(before or stored_units(self.baseline, after, allowed, ours), after)
        pairs = pair_units(before, after, allowed)
        require_separate_runs(before, after)
        return judge(pairs, self.rules, with_detectable=with_detectable, further_notes=left_out(before, after))

    def check_stored(self) -> None:
        """Check the valid runs that both sides have so far. Raises DataError, UsageError if they are not comparable."""
        allowed = check_allowed(self.allow)
        stored = [find_runs([side]) if side.exists() else [] for side in (self.baseline, self.candidate)]
        sides = [valid_units([Run.load(path) for path in runs if (path / MANIFEST).exists()])[0] for runs in stored]
        if all(sides):
            before, after = self._of_policies(*sides)
            require_comparable(before, after, allowed)
            require_separate_runs(before, after)

    def _of_policies(self, before: list[GateUnit], after: list[GateUnit]) -> tuple[list[GateUnit], list[GateUnit]]:
        """The units of both sides that have the policies asked for. Raises UnknownNameError if a side has none."""
        ours, theirs = self.policies
        return of_policy(before, ours, "baseline"), of_policy(after, theirs, "candidate")


def measured_and_judged(sides: GateSides, wanted: PairsWanted, files: VerdictFiles, messages: Console) -> Verdict:
    """Measure the pairs that are wanted, and judge them. Raises UsageError, DataError, RunError.

    ``files``: why there is no verdict is written there.
    """
    try:
        if wanted.given:
            measure(sides, wanted, messages)
        return sides.judged()
    except (DataError, RunError) as error:
        files.write_error(error)
        raise


def measure(sides: GateSides, wanted: PairsWanted, messages: Console) -> None:
    """Measure pairs with the commands of both sides, until the verdict is known unless their number is fixed.

    A pair of which a valid run is stored is not measured again. What is stored is checked before anything is measured
    and after every pair. Raises DataError, UsageError for an invalid command and for stored runs of another command or
    seed, RunError if a command fails or gives INVALID runs only.
    """
    if sides.baseline.resolve() == sides.candidate.resolve():
        raise UsageError(f"both sides would store their runs in {sides.baseline}; give each a directory of its own")
    most = wanted.pairs or wanted.max_pairs or MAX_PAIRS
    work = Work("gate", most, "pairs", at_most=sides.rules.sequential)

    def tell(line: str) -> None:
        if not work.doing:
            messages.say(f"measuring {'at most ' * sides.rules.sequential}{counted(most, 'pair')}")
        work.doing = line
        messages.say(line)

    commands = (sides.baseline, wanted.baseline_command or ""), (sides.candidate, wanted.candidate_command or "")
    both = [Side(directory, command) for directory, command in commands]
    with sole_use(sides.baseline), sole_use(sides.candidate), shown(messages, work):
        for side in both:
            _check_stored(side, most, wanted.first_seed)
        sides.check_stored()
        for side in both:
            side.directory.mkdir(parents=True, exist_ok=True)
            files.write_text(side.command + "\n", side.directory / COMMAND)
        for runs, (pair, place) in enumerate(abba(most), start=1):
            label, out = f"pair {pair + 1}, {('baseline', 'candidate')[place]}", both[place].run(pair)
            if any(manifest.valid for manifest in _stored(out)):
                tell(f"{label}: measured before")
            else:
                tell(label)
                _measure(both[place], out, wanted.first_seed + pair, label, tell)
            if runs % 2 == 0:
                sides.check_stored()
                work.done = pair + 1
                if _decided(sides, pair + 1, most, messages):
                    return


def _decided(sides: GateSides, pairs: int, most: int, messages: Console) -> bool:
    if not sides.rules.sequential or pairs < pairs_needed(sides.rules, len(sides.rules.gated)):
        return False
    verdict = sides.judged(with_detectable=False)
    cause = f": {verdict.cause.worded(VERDICTS)}" if verdict.cause else ""
    goes_on = f", continuing{cause}" if verdict.outcome == "inconclusive" and pairs < most else ""
    messages.say(f"after {counted(pairs, 'pair')}: {verdict.outcome}{goes_on}")
    return verdict.outcome != "inconclusive"


def abba(pairs: int) -> Iterator[tuple[int, int]]:
    """(pair, side) in order of measurement: side 0 first in even pairs, side 1 in odd ones."""
    return ((pair, side) for pair in range(pairs) for side in alternating((0, 1), pair))


def _check_stored(side: Side, pairs: int, first_seed: int) -> None:
    """Raise UsageError for an invalid command, and for stored pairs of another command or seed than this one's."""
    side.argv(side.directory, 0)
    valid = [(pair, stored) for pair in range(pairs) for stored in _stored(side.run(pair)) if stored.valid]
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
        try:
            status, stderr = run_supervised(argv, GRACE_S, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        except OSError as error:
            raise UsageError(f"cannot start {argv[0]!r}: {error.strerror or error}") from None
        tail = " / ".join(stderr.strip().splitlines()[-_KEPT_LINES:]) or "no output"
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
