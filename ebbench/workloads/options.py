"""Options of a request plan."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from ebbench.config.strict_toml import not_positive
from ebbench.errors import UnknownNameError, UsageError

if TYPE_CHECKING:
    from ebbench.traffic.schedule import Load
    from ebbench.workloads.sessions import SessionOptions
    from ebbench.workloads.shared_prefix import PrefixOptions


TIME_UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
"""Units of a trace's times, and how many of each make a second."""


RECORDED = ("trace:", "log:")
"""Prefixes of a workload that is a file of recorded requests; both mean the same."""


def recorded_file(workload: str) -> Path | None:
    """The file of ``trace:FILE`` or ``log:FILE``; None for other workloads. Raises UsageError if it names none."""
    prefix = next((one for one in RECORDED if workload.startswith(one)), None)
    if prefix is None:
        return None
    if workload == prefix:
        raise UsageError(f"{prefix} names no file; write {prefix}FILE")
    return Path(workload.removeprefix(prefix)).expanduser()


def is_recorded(workload: str) -> bool:
    """Whether a workload is ``trace:FILE`` or ``log:FILE``."""
    return workload.startswith(RECORDED)


@dataclass(frozen=True)
class PlanOptions:
    """Everything a plan depends on: equal options give byte-identical plans.

    ``workload``: a bundled name, ``log:FILE`` or ``trace:FILE`` (recorded requests), ``reference:PATH`` (as used in a
    published run) or the path of a TOML file. ``scenario``: likewise; None is ``trace`` for traces and
    ``saturated`` otherwise. ``num_prompts``: number of sessions (a conversation is one session); None uses the
    scenario's or the workload's. ``source``: ``auto``, ``hub``, ``file:PATH`` or ``profile``. ``max_concurrency``:
    open sessions. Rates are in sessions/s (shares in a scenario refer to ``saturation_rate``; an infinite
    ``request_rate`` opens all sessions of a closed loop at once), lengths in tokens. ``burstiness``: shape of gamma
    gaps; 1 is Poisson, less is burstier. ``speed`` divides a trace's times, which are in ``time_unit`` (s, ms, us
    or ns; None: by the rule of :mod:`ebbench.workloads.trace_times`). ``rate_scale`` multiplies the rates that a
    scenario or a fitted workload gives. ``prefix_share``, ``prefix_groups``, ``cache_hit_rate``: see
    :mod:`ebbench.workloads.shared_prefix`. ``duration_s``: time during which sessions are released.
    ``max_model_len``: longest prompt plus output in tokens (None: no limit); longer requests are refused, or left
    out with ``drop_too_long``. ``tokenizer`` (name or folder) counts the tokens of text; None estimates them from
    bytes. ``with_text`` False leaves out the prompts' text, which simulated engines do not read. ``columns`` names
    the columns of a log (see :func:`ebbench.workloads.log_columns.parse_columns`); ``keep_text`` sends a log's own
    prompts, which are otherwise never kept. ``think_time``, ``tool_time``, ``tool_share``, ``sub_agents``,
    ``abandon_after``, ``thinking_len``: see :mod:`ebbench.workloads.sessions`; they replace what the workload's
    file says. ``lora_assignment``, ``images``: see :mod:`ebbench.workloads.attachments`. ``redraw``: recorded requests
    are a supply to draw from: a part of a log begins where the seed says, and a data set that holds too few sessions is
    read again (a log always is, where ``num_prompts`` or the scenario asks for more).

    Raises UsageError for an invalid value.
    """

    workload: str
    scenario: str | None = None
    num_prompts: int | None = None
    seed: int = 0
    source: str = "auto"
    max_concurrency: int | None = None
    request_rate: float | None = None
    saturation_rate: float | None = None
    burstiness: float | None = None
    input_len: int | None = None
    output_len: int | None = None
    length_distribution: str | None = None
    speed: float | None = None
    time_unit: str | None = None
    duration_s: float | None = None
    max_model_len: int | None = None
    drop_too_long: bool = False
    tokenizer: str | None = None
    with_text: bool = True
    rate_scale: float | None = None
    prefix_share: float | None = None
    prefix_groups: int | None = None
    cache_hit_rate: float | None = None
    columns: str | None = None
    keep_text: bool = False
    think_time: str | None = None
    tool_time: str | None = None
    tool_share: float | None = None
    sub_agents: str | None = None
    abandon_after: str | None = None
    thinking_len: int | None = None
    lora_assignment: str | None = None
    images: str | None = None
    redraw: bool = False

    def __post_init__(self) -> None:
        for key in _POSITIVE:
            if key == "request_rate" and self.request_rate == inf:
                continue
            if problem := not_positive(key.removesuffix("_s").replace("_", " "), getattr(self, key)):
                raise UsageError(problem)
        _ = self.prefixes  # raises UsageError for values that cannot be used
        _require_storable(self.seed, self.num_prompts)
        if self.time_unit is not None and self.time_unit not in TIME_UNITS:
            raise UnknownNameError("time unit", self.time_unit, TIME_UNITS)

    @property
    def prefixes(self) -> PrefixOptions:
        """The options of shared prefixes."""
        from ebbench.workloads.shared_prefix import PrefixOptions

        return PrefixOptions(self.prefix_share, self.prefix_groups, self.cache_hit_rate)

    @property
    def lengths_set(self) -> bool:
        """Whether the caller set lengths."""
        return not (self.input_len is None and self.output_len is None and self.length_distribution is None)

    @property
    def sessions(self) -> SessionOptions:
        """The options that describe sessions."""
        from ebbench.workloads.sessions import SessionOptions

        names = (field.name for field in fields(SessionOptions))
        return SessionOptions(**{name: getattr(self, name) for name in names})

    @property
    def load(self) -> Load:
        """The options of the load."""
        from ebbench.traffic.schedule import Load

        return Load(
            self.max_concurrency, self.request_rate, self.saturation_rate, self.burstiness, self.duration_s,
            self.rate_scale or 1.0,
        )  # fmt: skip


MOST_SEED = 2**63 - 1
"""Stored tables hold seeds as 64-bit integers."""
MOST_SESSIONS = 50_000_000
"""Some 10 GB of plan; beyond that, a plan takes hours to draw."""


def _require_storable(seed: int, sessions: int | None) -> None:
    """Raise UsageError for a seed or a number of sessions that tables of runs cannot hold."""
    if seed < 0:
        raise UsageError(f"seed must be 0 or more, not {seed}")
    if seed > MOST_SEED:
        raise UsageError(f"seed must be at most {MOST_SEED}, not {seed}")
    if sessions is not None and sessions > MOST_SESSIONS:
        raise UsageError(f"num prompts must be at most {MOST_SESSIONS:,}, not {sessions:,}")


_POSITIVE = (
    "num_prompts", "max_concurrency", "request_rate", "saturation_rate", "burstiness", "input_len", "output_len",
    "thinking_len", "speed", "duration_s", "max_model_len", "rate_scale",
)  # fmt: skip
