"""Options of a request plan."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from ebbench.config.declare import LOAD, MOST_SECONDS, SESSIONS, WORKLOAD, check_ranges, declare
from ebbench.errors import UnknownNameError, UsageError
from ebbench.installation import located

if TYPE_CHECKING:
    from ebbench.traffic.spec import Load


TIME_UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
"""Units of a trace's times, and how many of each make a second."""
RECORDED = ("trace:", "log:")
"""Prefixes of a workload that is a file of recorded requests; both mean the same."""


def recorded_file(workload: str) -> Path | None:
    """The file of ``trace:FILE`` or ``log:FILE``; None for other workloads. Raises UsageError if it names none."""
    prefix = next((known for known in RECORDED if workload.startswith(known)), None)
    if prefix is None:
        return None
    if workload == prefix:
        raise UsageError(f"{prefix} names no file; write {prefix}FILE")
    return located(workload.removeprefix(prefix))


def fitted_acceptance(workload: str) -> tuple[float, ...]:
    """Acceptance of drafted tokens by position, of a workload file that was fitted to a log with it; else empty."""
    if not workload.endswith(".toml") or not Path(workload).expanduser().is_file():
        return ()
    from ebbench.foreign.documents import read_toml

    fitted = read_toml(Path(workload).expanduser()).get("fitted")
    rates = fitted.get("acceptance", ()) if isinstance(fitted, dict) else ()
    return tuple(rates) if isinstance(rates, list) else ()


def is_recorded(workload: str) -> bool:
    """Whether a workload is ``trace:FILE`` or ``log:FILE``."""
    return workload.startswith(RECORDED) and not mixture_parts(workload)


_PART = re.compile(r"(?:(?P<name>[\w.-]+)=)?(?P<workload>.+):(?P<share>\d*\.?\d+)")


def mixture_parts(workload: str) -> list[tuple[str, str, float]]:
    """Class, workload and share of each part of ``chat=sharegpt:0.6 rag=log:rag.csv:0.4``; empty for a single workload.

    A part without a class has the name of its workload, or of its file.
    """
    words = re.split(r"[\s,]+", workload.strip())
    parts = [_PART.fullmatch(word) for word in words]
    if any(parts) and len(words) > 1 and not all(parts) and not workload.startswith(RECORDED):
        raise UsageError(
            f"{workload}: a mixture gives each workload a share, as in chat=sharegpt:0.6 rag=longbench:0.4; "
            f"{words[next(at for at, part in enumerate(parts) if part is None)]} has none"
        )
    if not all(parts) or (len(words) == 1 and "=" not in workload.partition(":")[0]):
        return []
    return [
        (part["name"] or _short_name(part["workload"]), part["workload"], float(part["share"]))
        for part in parts
        if part
    ]


def is_mixture(workload: str) -> bool:
    """Whether a workload is several with shares, or a file of :mod:`ebbench.workloads.mixture`. Raises UsageError."""
    if mixture_parts(workload):
        return True
    path = Path(workload).expanduser()
    if not workload.endswith(".toml") or not path.is_file():
        return False
    from ebbench.foreign.documents import read_toml

    return "classes" in read_toml(path)


def _short_name(workload: str) -> str:
    return Path(workload.partition(":")[2] or workload).stem


MOST_SEED = 2**63 - 1
"""Stored tables hold seeds as 64-bit integers."""
MOST_SESSIONS = 50_000_000
"""Some 10 GB of plan; beyond that, a plan takes hours to draw."""


@dataclass(frozen=True)
class PlanOptions:
    """Everything a plan depends on: equal options give byte-identical plans. None: what scenario or workload say.

    Raises UsageError for an invalid value.
    """

    workload: str = declare(help="A workload (`ebbench workloads list`), log:FILE, or several with shares.", file=True)
    """A bundled name, ``log:FILE`` or ``trace:FILE`` (recorded requests), ``reference:PATH`` (as used in a published
    run), the path of a TOML file, or several of them with shares (:mod:`ebbench.workloads.mixture`)."""
    scenario: str | None = declare(
        None,
        "When requests arrive: a name or a TOML file.",
        LOAD,
        names=("--scenario", "-s"),
        complete="scenarios",
        file=True,
    )
    """None is ``trace`` for recorded requests and ``saturated`` otherwise."""
    num_prompts: int | None = declare(
        None, "Sessions to plan: single requests or conversations. Default: what scenario, workload or trace hold.",
        WORKLOAD, names=("--num-prompts", "-n"), at_least=1, at_most=MOST_SESSIONS,
    )  # fmt: skip
    seed: int = declare(
        0, "Seed of the plan; equal seeds give byte-identical plans.", WORKLOAD, at_least=0, at_most=MOST_SEED
    )
    source: str = declare("auto", "auto, hub, profile or file:PATH.", WORKLOAD, file=True)
    max_concurrency: int | None = declare(
        None, "Most sessions open at a time.", LOAD, names=("--max-concurrency", "-c"), at_least=1
    )
    request_rate: float | None = declare(
        None, "Sessions/s, open loop; inf: all at once, up to --max-concurrency.", LOAD, above=0, infinite=True
    )
    saturation_rate: float | None = declare(
        None, "Measured saturation in sessions/s, for phases given as a share.", LOAD, above=0
    )
    burstiness: float | None = declare(None, "Shape of gamma gaps: 1 is Poisson, less is burstier.", LOAD, above=0)
    input_len: int | None = declare(None, "Mean prompt tokens.", WORKLOAD, at_least=1)
    output_len: int | None = declare(None, "Mean output tokens.", WORKLOAD, at_least=1)
    length_distribution: str | None = declare(None, "uniform, geometric, gamma:SHAPE or fixed.", WORKLOAD)
    speed: float | None = declare(None, "Time factor of a trace: 2 is twice as fast.", LOAD, above=0)
    time_unit: str | None = declare(
        None, "Unit of a trace's times: s, ms, us or ns. Default: derived from the file; required if ambiguous.", LOAD
    )
    duration_s: float | None = declare(
        None, "Seconds after which no session is released; open ones run to their end.", LOAD, names=("--duration",),
        above=0, at_most=MOST_SECONDS,
    )  # fmt: skip
    max_model_len: int | None = declare(None, at_least=1)
    """Longest prompt plus output in tokens; None: no limit. In files and on the command line the server's setting."""
    drop_too_long: bool = declare(
        False, "Drop requests longer than --max-model-len.", WORKLOAD, names=("--drop-too-long",)
    )
    """Without it they are refused."""
    tokenizer: str | None = declare(
        None,
        "Tokenizer that counts the tokens of texts (default: estimate), and of answers without usage.",
        WORKLOAD,
        file=True,
    )
    """Name or folder."""
    with_text: bool = True
    """False leaves out the prompts' text, which simulated engines do not read."""
    counts_answers: bool = False
    """Whether ``tokenizer`` also counts the answers of a server; otherwise it needs texts in the workload."""
    rate_scale: float | None = declare(None, "Factor of the rates in a scenario or a fitted workload.", LOAD, above=0)
    prefix_share: float | None = declare(
        None, "Share of synthetic prompts that is their group's common prefix.", WORKLOAD, above=0, below=1
    )
    prefix_groups: int | None = declare(None, "Groups with a common prefix each; default: 1.", WORKLOAD, at_least=1)
    cache_hit_rate: float | None = declare(
        None, "Choose the common prefixes for this prefix cache hit rate.", WORKLOAD, above=0, below=1
    )
    columns: str | None = declare(
        None, "A log's columns: input=A,output=B,time=C,session=D; default: by their names.", WORKLOAD
    )
    keep_text: bool = declare(
        False, "Send a log's own prompts; default: only their lengths are read.", WORKLOAD, names=("--keep-text",)
    )
    think_time: str | None = declare(None, "Pause before each later turn: seconds, or exponential:mean=20.", SESSIONS)
    tool_time: str | None = declare(None, "The same where the client runs a tool; see --tool-share.", SESSIONS)
    tool_share: float | None = declare(None, "Share of the later turns that follow a tool call.", SESSIONS)
    sub_agents: str | None = declare(
        None, "Parallel requests between turns: 3, or count=3,share=0.5,turns=2, with input= and output= tokens.",
        SESSIONS,
    )  # fmt: skip
    abandon_after: str | None = declare(None, "Clients hang up on an incomplete answer after this time.", SESSIONS)
    thinking_len: int | None = declare(
        None, "Mean thinking tokens before each answer, in addition to it.", SESSIONS, at_least=1
    )
    recorded_pauses: bool = declare(
        False, "Keep pauses and parallel requests within a log's sessions under another load than its own times.",
        SESSIONS, names=("--recorded-pauses",),
    )  # fmt: skip
    max_pause_s: float | None = declare(
        None, "Longest pause between turns, in seconds; longer ones are cut.", SESSIONS, names=("--max-pause",),
        at_least=0, at_most=MOST_SECONDS,
    )  # fmt: skip
    session_start: str | None = declare(
        None, "Where in their course the first open sessions begin, their history cached: 0.5, or a range: 0.25-0.75.",
        SESSIONS,
    )  # fmt: skip
    lora_assignment: str | None = declare(
        None, "Adapters by name, one per session, over HTTP: sql=3,chat=1,base.", WORKLOAD
    )
    priorities: str | None = declare(
        None, "Priority of each class, the lowest first: chat=0,batch=10; see --scheduling-policy.", WORKLOAD
    )
    images: str | None = declare(None, "Images in every prompt: tokens=256,count=2,side=448.", WORKLOAD)
    redraw: bool = declare(False, "Of a log longer than num_prompts, each seed takes another part.")
    """Recorded requests are a supply to draw from: a part of a log begins where the seed says, and a data set that
    holds too few sessions is read again (a log always is, where ``num_prompts`` or the scenario asks for more)."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.prefix_share is not None and self.cache_hit_rate is not None:
            raise UsageError("--prefix-share and --cache-hit-rate both set the shared prefix; leave one of them out")
        if self.prefix_groups is not None and not self.shares_prefixes:
            raise UsageError("--prefix-groups needs --prefix-share or --cache-hit-rate")
        if self.time_unit is not None and self.time_unit not in TIME_UNITS:
            raise UnknownNameError("time unit", self.time_unit, TIME_UNITS)

    @property
    def shares_prefixes(self) -> bool:
        """Whether prompts are to share prefixes."""
        return self.prefix_share is not None or self.cache_hit_rate is not None

    @property
    def lengths_set(self) -> bool:
        """Whether the caller set lengths."""
        return not (self.input_len is None and self.output_len is None and self.length_distribution is None)

    @property
    def load(self) -> Load:
        """The options of the load."""
        from ebbench.traffic.spec import Load

        return Load(
            self.max_concurrency, self.request_rate, self.saturation_rate, self.burstiness, self.duration_s,
            self.rate_scale or 1.0,
        )  # fmt: skip


def scenario_meant(
    workload: str, scenario: str | None, request_rate: float | None, burstiness: float | None
) -> str | None:
    """The given scenario, or the one implied by the other options, by the rules of `vllm bench serve`.

    An infinite rate releases all requests at once, up to the concurrency cap: ``saturated``.
    """
    if scenario is None and request_rate == inf and not is_recorded(workload):
        return "saturated"
    if scenario is None and request_rate is not None and not is_recorded(workload):
        return "poisson" if burstiness is None else "gamma"
    return scenario
