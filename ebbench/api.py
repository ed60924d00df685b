"""Runs, capacity searches and plans as objects of Python. docs/python.md describes what is stable.

The functions take the settings of a run by the names that they have in TOML files, make what the commands make, and
return results that show themselves in a terminal and in a notebook.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import io
import shutil
import tempfile
import warnings
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast, get_origin, overload

import pyarrow as pa
from rich.text import Text

from ebbench.analysis.cases import ComparisonCase, RunResult, cases_of_results, result_of
from ebbench.analysis.columns import RequestColumns
from ebbench.analysis.documents import Document
from ebbench.analysis.metrics import parse_slo
from ebbench.analysis.sessions import SESSIONS, sessions_table
from ebbench.analysis.summary import metric_columns
from ebbench.config.declare import declared_in
from ebbench.errors import (
    DataError,
    EbbenchError,
    InputFileError,
    InterruptedRunError,
    RunError,
    UnknownNameError,
    UsageError,
    check_known,
)
from ebbench.process.termination import Signals, stoppable_from
from ebbench.records.run import Run, find_runs, unused
from ebbench.records.warnings import counted
from ebbench.render import figures, report
from ebbench.render.documents import Console, ProgressEvent, as_html
from ebbench.run_policies import MadeRuns, in_order, make_runs, series_and_output
from ebbench.runs.file import PLAN_FILE, RUN_FILE, SEARCH_FILE, asked_for, of_keywords
from ebbench.runs.prepare import refuse_empty
from ebbench.runs.stored import run_paths
from ebbench.spec.commands import OF_A_PLAN, SET_BY_SEARCH, PlanCommand, RunCommand, SearchCommand
from ebbench.spec.run import known_settings, named_as_keys

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import ConsoleOptions, RenderResult

    from ebbench.analysis.paired import Compared
    from ebbench.sizing.choose import Costed, DeploymentPlan
    from ebbench.sizing.command import Searched

__all__ = [
    "CapacityResult", "Comparison", "DataError", "EbbenchError", "InputFileError", "PlanResult", "ProgressEvent",
    "RunError", "RunResult", "Runs", "UnknownNameError", "UsageError", "capacity", "capacity_async", "compare", "load",
    "plan", "plan_async", "run", "run_async",
]  # fmt: skip

P = ParamSpec("P")
T = TypeVar("T")
OnProgress = Callable[[ProgressEvent], object] | bool | None
"""A function that gets every event; True prints what the command would print; None is silent."""
WIDTH, NOTEBOOK_WIDTH = 120, 96
"""Characters per line of ``str(result)``, and of the text that a notebook shows."""


# Results. Each shows itself: ``print``, ``rich.print``, and as HTML in a notebook.


class Shown(ABC):
    """What all results share: text for terminals and HTML for notebooks are made of the same tables."""

    @abstractmethod
    def __rich_console__(self, console: Any, options: ConsoleOptions) -> RenderResult:
        """The parts that a terminal shows."""

    @abstractmethod
    def to_arrow(self) -> pa.Table:
        """The figures as an Arrow table."""

    def to_pandas(self) -> pd.DataFrame:
        """The figures as a DataFrame."""
        frame: pd.DataFrame = self.to_arrow().to_pandas()
        return frame

    def __str__(self) -> str:
        console = Console(width=WIDTH, highlight=False, color_system=None)
        with console.capture() as captured:
            console.print(self)
        return captured.get()


_TYPES: Mapping[type, pa.DataType] = {int: pa.int64(), str: pa.string()}


@dataclass(frozen=True, repr=False)
class Runs(Shown, Sequence[RunResult]):
    """Runs in order of policy and seed. ``runs[0]`` is one of them, ``runs["ebplus"]`` those of a policy."""

    results: tuple[RunResult, ...]

    @overload
    def __getitem__(self, index: int) -> RunResult: ...
    @overload
    def __getitem__(self, index: slice | str) -> Runs: ...
    def __getitem__(self, index: int | slice | str) -> RunResult | Runs:
        if isinstance(index, int):
            return self.results[index]
        if isinstance(index, slice):
            return Runs(self.results[index])
        check_known("policy of these runs", index, self.policies)
        return Runs(tuple(result for result in self.results if result.summary.policy == index))

    def __len__(self) -> int:
        return len(self.results)

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies in the order of their first runs."""
        return tuple(dict.fromkeys(result.summary.policy for result in self.results))

    @property
    def valid(self) -> bool:
        """Whether no run is INVALID; the reasons are in ``runs[0].summary.reasons``."""
        return all(result.summary.valid for result in self.results)

    @property
    def cases(self) -> tuple[ComparisonCase, ...]:
        """The runs by load and environment, as tables show them."""
        return cases_of_results(self.results)

    def to_arrow(self) -> pa.Table:
        """One row per run: its settings and figures by the names of ``ebbench run --json``."""
        return pa.concat_tables([result.summary.to_table() for result in self.results], promote_options="permissive")

    def requests(self) -> pa.Table:
        """The requests of all runs, one row each, with the columns ``policy`` and ``seed`` first."""
        return self._joined(result.run.requests for result in self.results)

    def sessions(self) -> pa.Table:
        """The sessions of all runs as of ``sessions.parquet``, one row each, with ``policy`` and ``seed`` first.

        Empty if every session is a single request.
        """
        session_tables = (sessions_table(RequestColumns.of(metric_columns(result.run))) for result in self.results)
        return self._joined(SESSIONS.empty_table() if table is None else table for table in session_tables)

    def classes(self) -> pa.Table:
        """Figures of each class of requests, one row per run and class, with ``policy`` and ``seed`` first.

        Empty if no request has a class.
        """
        return self._joined(result.summary.classes_table() for result in self.results)

    def _joined(self, tables: Iterable[pa.Table]) -> pa.Table:
        named = []
        for result, table in zip(self.results, tables, strict=True):
            for name, value in (("seed", result.summary.seed), ("policy", result.summary.policy)):
                table = table.add_column(0, name, pa.array([value] * table.num_rows, _TYPES[type(value)]))
            named.append(table)
        return pa.concat_tables(named, promote_options="permissive")

    def save(self, directory: str | Path) -> Runs:
        """Copy the run directories into a new directory; returns the copies. Raises UsageError if it exists."""
        target = Path(directory).expanduser()
        if target.exists():
            raise UsageError(f"{target} exists; give another directory")
        for result in self.results:
            shutil.copytree(result.run.path, unused(target / result.run.path.name))
        return load(target)

    def __repr__(self) -> str:
        workloads = ", ".join(dict.fromkeys(result.summary.workload for result in self.results))
        invalid = "" if self.valid else ", INVALID"
        return f"<Runs: {len(self)} of {workloads or 'nothing'}, {', '.join(self.policies)}{invalid}>"

    def __rich_console__(self, console: Any, options: ConsoleOptions) -> RenderResult:
        yield report.render(self.cases, width=options.max_width) if self.results else repr(self)

    def _repr_html_(self) -> str:
        if not self.results:
            return escape(repr(self))
        from ebbench.report.page_data import latency_curves

        cases = self.cases
        _, curves = latency_curves(cases, [result.run for result in self.results])
        return _html(report.document(cases), figures.latency_chart(curves, self.policies))


@dataclass(frozen=True, repr=False)
class CapacityResult(Shown):
    """The highest load within limits, per policy. ``rows``: one object per policy, as ``--json`` gives them.

    ``directory``: of the probes, None if they were not kept.
    """

    searched: Searched
    rows: tuple[Mapping[str, Any], ...]
    directory: Path | None = None

    def __getitem__(self, policy: str) -> Mapping[str, Any]:
        by_policy = {row["policy"]: row for row in self.rows}
        check_known("policy of this search", policy, by_policy)
        return by_policy[policy]

    def to_arrow(self) -> pa.Table:
        """One row per policy: capacity, interval (``low``, ``high``), what limits it, latencies near it."""
        nested = ("curve", "limits_ms", "stopped", "refused")
        return pa.Table.from_pylist([{k: v for k, v in row.items() if k not in nested} for row in self.rows])

    def curves(self) -> pa.Table:
        """One row per probe: policy, load, share within the limits, latencies (ms), throughput."""
        return pa.Table.from_pylist([{"policy": row["policy"], **point} for row in self.rows for point in row["curve"]])

    def __repr__(self) -> str:
        name = "capacity_concurrency" if self.searched.search.by_concurrency else "capacity_requests_per_s"
        capacities = ", ".join(f"{row['policy']} {row[name]:.4g}" for row in self.rows if row[name] is not None)
        return f"<CapacityResult: {name.removeprefix('capacity_')}: {capacities or 'none'}>"

    def __rich_console__(self, console: Any, options: ConsoleOptions) -> RenderResult:
        from ebbench.sizing.command import parts

        for part in parts(self.searched, options.max_width):
            yield Text(named_as_keys(part)) if isinstance(part, str) else part

    def _repr_html_(self) -> str:
        from ebbench.sizing import sentences
        from ebbench.sizing.chart import curves

        search, outcomes = self.searched.search, self.searched.outcomes
        by = search.by_concurrency
        remarks = sentences.remarks(outcomes, search.limits, by, bars=False)
        notes = (*remarks, *search.notes, *sentences.caveats(outcomes, by))
        title = sentences.announce(search.limits, by).removeprefix("searching for the ")
        document = Document("capacity", title[0].upper() + title[1:], (sentences.table(outcomes, by),), notes)
        return _html(document, curves(self.rows))


@dataclass(frozen=True, repr=False)
class PlanResult(Shown):
    """The deployments that carry a load, cheapest first."""

    plan: DeploymentPlan

    @property
    def deployments(self) -> tuple[Costed, ...]:
        """Cheapest first; empty if no candidate carries the load."""
        return self.plan.deployments.carrying

    @property
    def best(self) -> Costed | None:
        """The cheapest one."""
        return next(iter(self.deployments), None)

    def to_dict(self) -> dict[str, Any]:
        """The object of ``ebbench plan --json``."""
        from ebbench.sizing.plan_sentences import as_dict

        return as_dict(self.plan)

    def to_arrow(self) -> pa.Table:
        """One row per deployment, cheapest first."""
        return pa.Table.from_pylist(self.to_dict()["deployments"])

    def __repr__(self) -> str:
        if self.best is None:
            return "<PlanResult: no candidate carries the load>"
        chosen = self.best.deployment
        what = f"{chosen.replicas} x {chosen.candidate.device} {chosen.candidate.shape} under {chosen.candidate.policy}"
        return f"<PlanResult: {len(self.deployments)} deployments, cheapest {what}>"

    def __rich_console__(self, console: Any, options: ConsoleOptions) -> RenderResult:
        from ebbench.sizing.plan_sentences import parts as plan_parts

        for part in plan_parts(self.plan):
            yield Text(named_as_keys(part)) if isinstance(part, str) else part

    def _repr_html_(self) -> str:
        from ebbench.sizing.chart import frontiers

        text = Console(width=NOTEBOOK_WIDTH, highlight=False, record=True, file=io.StringIO())
        text.print(self)
        drawn = _image(frontiers(self.plan)) if self.deployments else ""
        return text.export_html(inline_styles=True, code_format=_PRE) + drawn


@dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """Policies compared on the same plans, with intervals and tests, per load and environment."""

    compared: Compared

    def to_dict(self) -> dict[str, Any]:
        """The object of ``ebbench compare --json``."""
        from ebbench.report import comparison

        return comparison.to_json(self.compared)

    def to_arrow(self) -> pa.Table:
        """One row per figure: its values, the change with its 95 % interval, the p-value, the verdict."""
        from ebbench.report import comparison

        sections = comparison.plain(self.compared).sections
        names = [column.name for column in sections[0].columns] if sections else []
        return pa.Table.from_pylist(
            [
                {"case": section.title, **dict(zip(names, row, strict=True))}
                for section in sections
                for row in section.rows
            ]
        )

    def __repr__(self) -> str:
        from ebbench.report import comparison

        verdicts = [
            comparison.verdict_sentence(comparison_of_load, policy)
            for comparison_of_load in self.compared.comparisons
            for policy in comparison_of_load.others
        ]
        return f"<Comparison: {' '.join(verdicts)}>"

    def __rich_console__(self, console: Any, options: ConsoleOptions) -> RenderResult:
        from ebbench.report import comparison

        yield comparison.console(self.compared, options.max_width)

    def _repr_html_(self) -> str:
        from ebbench.report import comparison

        return _html(comparison.document(self.compared))


_PRE = '<pre style="line-height:normal;font-family:monospace">{code}</pre>'


def _html(document: Document, chart: Any = None) -> str:
    renamed = replace(document, notes=tuple(named_as_keys(note) for note in document.notes))
    return f"<div>{as_html(renamed, 'h4')}{'' if chart is None else _image(chart)}</div>"


def _image(chart: Any) -> str:
    data = b64encode(figures.svg(chart).encode()).decode()
    return f'<img style="max-width:100%" alt="chart" src="data:image/svg+xml;base64,{data}"/>'


# Functions.


def run(
    workload: str, *, policies: Sequence[str] | str | None = None, progress: OnProgress = None, **settings: Any
) -> Runs:
    """Run a workload, or a TOML file of ``ebbench run``, under one or more policies, and return the runs.

    ``policies``: the setting ``policy`` under the name of several. ``settings``: those of a TOML file, such as
    ``device="h200"``, ``engine="http://127.0.0.1:8000"``, ``request_rate=5.0``, ``repeats=7``; `help(eb.run)` lists
    them. The runs are stored in ``output_dir``; without it they are kept until Python ends (``runs.save(...)``).

    An INVALID run is returned with a Python warning. Raises UsageError for settings that cannot be, RunError for a
    server that cannot be reached. KeyboardInterrupt, and an error after the first run, name what was kept.
    """
    with _named_as_keywords():
        asked = asked_for(str(workload), _of_keywords(run, settings, policies))
        stored = "output_dir" in asked
        if not stored:
            asked["output_dir"] = str(Path(tempfile.mkdtemp(dir=_temporary_root())) / "runs")
        series, output = series_and_output(asked)
        done = MadeRuns()
        try:
            make_runs(series, replace(output, quiet=not progress), _console(progress), done)
        except EbbenchError as error:
            _say_kept(done, error)
            raise
        if done.interrupted:
            stopped = KeyboardInterrupt("interrupted")
            _say_kept(done, stopped)
            raise stopped
    runs = Runs(tuple(in_order(series, done.results)))
    for result in runs:
        if not result.summary.valid:
            reasons = ", ".join(map(str, result.summary.reasons))
            warnings.warn(f"INVALID run of {result.summary.policy}: {reasons}", stacklevel=2)
    return runs


def load(*paths: str | Path, goodput: str | None = None) -> Runs:
    """Stored runs: run directories, directories of runs, or their ``name``. ``goodput``: other limits than their own.

    Raises UsageError without any, DataError for a run that is missing or damaged.
    """
    if not paths:
        raise UsageError("no runs are given; give their directory, or their name")
    slo = None if goodput is None else parse_slo([goodput])
    directories = find_runs(run_paths(paths, warnings.warn))
    return Runs(tuple(result_of(Run.load(path), slo) for path in directories))


def capacity(
    workload: str, *, policies: Sequence[str] | str | None = None, progress: OnProgress = None, **settings: Any
) -> CapacityResult:
    """The highest load within latency limits, per policy, as ``ebbench capacity`` finds it.

    ``goodput``: limits in ms, ``"ttft:500 tpot:50"``. ``precision``: half of the 95 % interval as a share; ``max_time``
    in s. ``settings``: these, and those of a run but its load. The probes are kept in ``output_dir`` only, from which a
    stopped search continues.

    Raises UsageError, also if no policy can meet the limits, and RunError.
    """
    from ebbench.sizing.command import Searched, capacity_search, find_capacity, refuse_nothing

    with _named_as_keywords(), tempfile.TemporaryDirectory(prefix="ebbench-") as temporary:
        asked = asked_for(workload, _of_keywords(capacity, settings, policies, SEARCH_FILE), SEARCH_FILE)
        directory = Path(asked["output_dir"]).expanduser() if "output_dir" in asked else None
        done = Searched(capacity_search(asked))
        find_capacity(done, directory or Path(temporary), _console(progress), quiet=not progress)
        refuse_nothing(done.outcomes)
        if directory is not None:
            done.store()
        return CapacityResult(done, tuple(done.rows), directory)


def plan(
    workload: str, *, request_rate: float, goodput: str, policies: Sequence[str] | str | None = None,
    workers: int | None = None, progress: OnProgress = None, **settings: Any,
) -> PlanResult:  # fmt: skip
    """The cheapest deployments that serve ``request_rate`` sessions/s within limits, as ``ebbench plan`` finds them.

    ``device``, ``tp``, ``instance``, ``policies``, ``max_num_batched_tokens``, ``max_num_seqs``: one or several to
    choose from. ``price`` per GPU-hour: ``"h200=3.5"`` or a TOML file. ``workers``: processes. ``settings``: these,
    those that say which requests are sent, and the simulated server's.

    The result is empty if no candidate carries the rate. Raises UsageError.
    """
    from ebbench.sizing.candidates import find_plan

    several = [name for name, declared in declared_in(PlanCommand).items() if get_origin(declared.kind) is tuple]
    given = {name: _several(value) if name in several else value for name, value in settings.items()}
    given |= {"request_rate": request_rate, "goodput": goodput}
    with _named_as_keywords():
        asked = {**_of_keywords(plan, given, policies, PLAN_FILE), "workload": workload}
        for name in several:
            if name in asked and name != "price":
                refuse_empty(name, asked[name])
        return PlanResult(find_plan(asked, _console(progress), workers=workers, quiet=not progress))


def compare(*runs: Runs | RunResult | str | Path, baseline: str | None = None, allow: Sequence[str] = ()) -> Comparison:
    """Compare policies on the same plans, paired: change, 95 % interval, p-value, as ``ebbench compare`` does.

    ``runs``: results, directories or names; a policy that two arguments hold on the same plan is compared with itself.
    ``baseline``: v1, else the first. ``allow``: conditions that may differ. Raises DataError for runs that are not
    comparable.
    """
    from ebbench.analysis.environment import check_allowed
    from ebbench.analysis.paired import compare_cases, load_groups

    with _named_as_keywords():
        groups = load_groups([argument for given in runs for argument in _arguments(given)])
        return Comparison(compare_cases(groups, baseline, check_allowed(allow)))


async def _in_thread(work: Callable[[], T]) -> T:
    """The result of ``work`` in a thread of its own. Cancelled, it stops as by Ctrl-C and is waited for."""
    signals, stopped = Signals(), list[BaseException]()

    def body() -> T | None:
        try:
            with stoppable_from(signals):
                return work()
        except (KeyboardInterrupt, InterruptedRunError) as error:
            stopped.append(error)  # not raised: a KeyboardInterrupt would end the event loop
            return None

    running = asyncio.ensure_future(asyncio.to_thread(body))
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            cancelled = error
            signals.send()
    result = running.result()
    if stopped or cancelled is not None:
        ended = cancelled or asyncio.CancelledError()
        for note in (note for error in stopped for note in getattr(error, "__notes__", ())):
            ended.add_note(note)
        raise ended
    return cast("T", result)


def _of_keywords(
    function: Callable[..., Any],
    settings: Mapping[str, Any],
    policies: Sequence[str] | str | None = None,
    table: Any = RUN_FILE,
) -> dict[str, Any]:
    """The settings of a function, checked, with ``policies`` under the name that files have."""
    known = {*inspect.signature(function).parameters}
    known |= {"policy"} if "policies" in known else set()
    given = dict(settings)
    if policies is not None and given.get("policy") is not None:
        raise UsageError("policies and policy are one setting; give one of them")
    chosen = given.pop("policy", None) if policies is None else policies
    if chosen is not None:
        given["policy"] = [chosen] if isinstance(chosen, str) else list(chosen)
    return of_keywords(given, known, table)


def _several(value: Sequence[Any] | str | float | None) -> Sequence[Any] | None:
    """Alternatives; a single one may stand alone."""
    return [value] if isinstance(value, str | int | float) else value


def _arguments(given: Runs | RunResult | str | Path) -> Iterator[tuple[Path, Sequence[Path]]]:
    """What is compared: a name or directory with its runs, or a run."""
    if isinstance(given, str | Path):
        yield Path(given), run_paths([given], warnings.warn)
    else:
        results = given if isinstance(given, Runs) else [given]
        yield from ((result.run.path, [result.run.path]) for result in results)


def _console(progress: OnProgress) -> Console:
    if callable(progress):
        return Console.followed_by(progress)
    return Console(stderr=True, highlight=False)


@cache
def _temporary_root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="ebbench-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


def _say_kept(done: MadeRuns, error: BaseException) -> None:
    """Note on the error where the finished runs are."""
    if done.results:
        places = ", ".join(repr(str(result.run.path)) for result in done.results)
        error.add_note(f"kept {counted(len(done.results), 'run')}: eb.load({places})")


@contextmanager
def _named_as_keywords() -> Iterator[None]:
    """Inside, errors name settings as keywords: max_num_seqs for --max-num-seqs."""
    try:
        yield
    except EbbenchError as error:
        error.args = tuple(named_as_keys(arg) if isinstance(arg, str) else arg for arg in error.args)
        raise


def _documented(function: Callable[..., Any], command: type, but: Sequence[str] = ()) -> None:
    """Name the keywords of ``**settings`` in the signature, from which notebooks complete, and in the help: the
    settings that ``command`` declares, and those of a run ``but`` some."""
    own = inspect.signature(function)
    kept = [parameter for parameter in own.parameters.values() if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
    taken = {parameter.name for parameter in kept} | {"workload", "policy"}
    of_command = declared_in(command)
    of_runs = {name: parameter for name, parameter in known_settings().items() if name not in (*but, *of_command)}
    known = {name: parameter for name, parameter in {**of_command, **of_runs}.items() if name not in taken}
    keywords = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=parameter.default if name in of_command else None
        )
        for name, parameter in known.items()
    ]
    described: Any = function
    described.__signature__ = own.replace(parameters=[*kept, *keywords])
    helps = [
        f"    {name}: {named_as_keys(declared.about.help)}".replace("\\[", "[") for name, declared in known.items()
    ]
    described.__doc__ = "\n".join([f"{function.__doc__}", "    Settings:", "", *helps, ""])


_documented(run, RunCommand)
_documented(capacity, SearchCommand, SET_BY_SEARCH)
_documented(plan, PlanCommand, tuple(name for name in known_settings() if name not in OF_A_PLAN))


def _beside_loop(function: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    async def awaited(*args: P.args, **kwargs: P.kwargs) -> T:
        return await _in_thread(partial(function, *args, **kwargs))

    described: Any = awaited
    described.__name__ = described.__qualname__ = f"{function.__name__}_async"
    described.__signature__ = inspect.signature(function)
    described.__doc__ = (
        f"As :func:`{function.__name__}`, beside the event loop: other tasks go on meanwhile. ``progress`` is called "
        f"in another thread.\n\n{function.__doc__}"
    )
    return awaited


run_async, capacity_async, plan_async = _beside_loop(run), _beside_loop(capacity), _beside_loop(plan)
