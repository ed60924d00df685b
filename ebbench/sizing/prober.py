"""Makes the runs of a capacity search; a server that ebbench starts itself serves all runs of one policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbench.records.run import MANIFEST, Run, slug, unused
from ebbench.render.live import Work, in_words, shown
from ebbench.runs.execute import measured, planned
from ebbench.sizing.estimate import USUAL_PROBES

if TYPE_CHECKING:
    from ebbench.devices.base import Device
    from ebbench.engines.base import Engine
    from ebbench.render.documents import Console
    from ebbench.runs.prepare import Series
    from vllm_eb.policy import PolicySpec


@dataclass
class Pace:
    """How long the probes of a search took (s), and about how many are left: of this policy, and policies after it."""

    policies_left: int = 0
    left: int = 0
    seconds: list[float] = field(default_factory=list)

    def ahead(self, probes: int) -> None:
        """About so many probes of this policy are left."""
        self.left = probes

    @property
    def to_go(self) -> str:
        """``, search about 4 min to go``; empty before the first probe has ended."""
        if not self.seconds:
            return ""
        probes = self.left + self.policies_left * USUAL_PROBES
        return f", search about {in_words(probes * sum(self.seconds) / len(self.seconds))} to go"


@dataclass(frozen=True)
class RunProber:
    """Makes the runs of one policy's search in ``folder``, and finds those of an earlier one.

    ``series``: has this one policy. ``scenario``: arrivals of an open loop. ``by_concurrency``: the load is a number of
    open sessions instead of a rate.
    """

    series: Series
    scenario: str
    by_concurrency: bool
    device: Device
    engine: Engine
    messages: Console
    folder: Path
    quiet: bool = False
    pace: Pace = field(default_factory=Pace)

    @property
    def spec(self) -> PolicySpec:
        """The policy."""
        return self.series.policies[0]

    def alone(self, sessions: int) -> Run:
        """Run sessions one at a time; the run of an earlier search is reused."""
        where = self.folder / f"{slug(self.spec.name)}-alone"
        if (where / MANIFEST).exists() and (run := Run.load(where)).manifest.valid:
            return run
        settings = {"num_prompts": sessions, "max_concurrency": 1, "burstiness": None}
        return self._run("saturated", settings, self.series.spec.plan.seed, unused(where), "one at a time")

    def probe(self, load: float, sessions: int, seed: int) -> Run:
        """Run sessions at a load."""
        where = unused(self.folder / f"{slug(self.spec.name)}-{load:.6g}-seed{seed}")
        if self.by_concurrency:
            settings = {"num_prompts": sessions, "max_concurrency": int(load)}
            return self._run("saturated", settings, seed, where, f"{load:.0f} open")
        return self._run(self.scenario, {"num_prompts": sessions, "request_rate": load}, seed, where, f"{load:.4g}/s")

    def earlier(self) -> list[tuple[float, Run]]:
        """Finished probes of a stopped search, in the order in which they were made."""
        runs = []
        for manifest in self.folder.glob(f"{slug(self.spec.name)}-*-seed*/{MANIFEST}"):
            run = Run.load(manifest.parent)
            if run.manifest.policy == self.spec.name and not run.manifest.interrupted:
                runs.append((self._load_of(run), run))
        return sorted(runs, key=lambda pair: pair[1].manifest.anchor_unix_ns)

    def _load_of(self, run: Run) -> float:
        if self.by_concurrency:
            return float(run.manifest.phases[0].max_concurrency)
        return float(run.manifest.facts["request_rate"])

    def _run(self, scenario: str, settings: Mapping[str, Any], seed: int, where: Path, load: str) -> Run:
        series = replace(self.series, spec=self.series.spec.changed(scenario=scenario, **settings))
        plan = planned(series, seed, self.device, self.messages, quiet=self.quiet)
        ready = series.prepared(self.spec, plan, self.device, self.engine)
        number = 1 + sum(1 for _ in self.folder.glob(f"{slug(self.spec.name)}-*-seed*/{MANIFEST}"))
        label = f"{self.spec.name}, probe {number}, {load}{self.pace.to_go}"
        began_s = time.monotonic()
        run = measured(ready, where, label, self.messages, quiet=self.quiet, brief=True).run
        if run.manifest.interrupted:
            raise KeyboardInterrupt
        if self.pace.left:  # not requests one at a time
            self.pace.seconds.append(time.monotonic() - began_s)
        return run


@contextmanager
def one_server(prober: RunProber) -> Iterator[RunProber]:
    """The prober with one server for all its runs if its engine starts a server per run; else the prober unchanged.

    A server takes up to minutes to start, and a search makes some twenty runs. Several replicas behind a gateway are
    started once too. Each run empties their prefix caches first. Raises what the start of a server raises.
    """
    from ebbench.engines.vllm import VllmEngine

    engine, quiet = prober.engine, prober.quiet
    if not isinstance(engine, VllmEngine):
        yield prober
        return

    def progress(log: Path) -> Callable[[float], None]:
        if not quiet:
            line = f"{prober.spec.name}: starting one server for all runs, log {log}"
            prober.messages.say(line)
        return lambda _waited_s: None

    begun = time.monotonic()
    with ExitStack() as stack:
        with shown(prober.messages, Work(f"{prober.spec.name}, waiting for the server"), quiet=quiet):
            start = engine.started(prober.spec, prober.device, prober.series.spec.server, progress)
            server = stack.enter_context(start)
        if not quiet:
            line = f"{prober.spec.name}: ready after {time.monotonic() - begun:.0f} s"
            prober.messages.say(line)
        yield replace(prober, engine=server)
