"""The store of cells: equal settings and code run once, any difference runs again."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ebbench.engines.base import EngineResult
from ebbench.engines.sim import SimEngine
from ebbench.errors import DataError, EbbenchError, InputFileError, UnknownNameError, UsageError
from ebbench.papers.options import PaperOptions
from ebbench.papers.table import PaperTable, Sections, make_runs
from ebbench.records.run import MANIFEST, Run
from ebbench.runs import key as key_module
from ebbench.runs.execute import Task, make
from ebbench.runs.key import directory_name, result_key
from ebbench.runs.pool import Outcome
from ebbench.runs.store import CELL, RunStore, run_missing
from ebbench.spec.run import RunSpec
from ebbench.spec.server import EngineOptions, HostCosts


def test_a_second_call_runs_nothing(store: RunStore, small_cell: RunSpec, shift_cell: RunSpec) -> None:
    again = RunStore(store.root)
    assert run_missing([small_cell, shift_cell], again, workers=1) == 0
    assert again.get(small_cell) is not None


def test_runs_that_follow_from_others_are_made_by_the_same_command(tmp_path: Path, small_cell: RunSpec) -> None:
    """Loads of figure 6 of the staggered paper are shares of a peak that its first runs find."""

    def sections(_options: PaperOptions, asked: RunStore) -> Sections:
        if asked.get(small_cell) is not None:
            asked.get(small_cell.changed(seed=1))
        return []

    store = RunStore(tmp_path)
    make_runs(PaperTable("table3", (), sections), PaperOptions(), store, workers=1, quiet=True)
    assert store.get(small_cell.changed(seed=1)) is not None


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1}, {"policy": "eb"}, {"device": "l40s"}, {"max_num_seqs": 65}, {"num_prompts": 41},
        {"enable_prefix_caching": False}, {"cost": "roofline"}, {"goodput": "ttft:500"}, {"shuffle": True},
        {"host": HostCosts(1e-3, 1e-5)}, {"gpu_memory_utilization": 0.5}, {"topology": "dp=2"},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_a_changed_setting_changes_the_key(small_cell: RunSpec, change: dict[str, object]) -> None:
    assert result_key(small_cell.changed(**change)) != result_key(small_cell)


def test_a_length_limit_taken_away_is_the_servers_default_again(small_cell: RunSpec) -> None:
    """The plan has no limit without one; a server always has."""
    limited = small_cell.changed(max_model_len=2048)
    assert (limited.plan.max_model_len, limited.server.max_model_len) == (2048, 2048)
    free = limited.changed(max_model_len=None)
    assert (free.plan.max_model_len, free.server.max_model_len) == (None, EngineOptions.max_model_len)


def test_the_weight_of_a_cell_does_not_change_the_key(small_cell: RunSpec) -> None:
    assert result_key(replace(small_cell, weight=99.0)) == result_key(small_cell)


def test_changed_code_changes_the_key(small_cell: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    before = result_key(small_cell)
    monkeypatch.setattr(key_module, "code_fingerprint", lambda engine: "other code")
    assert result_key(small_cell) != before


def test_a_changed_scenario_file_changes_the_key(shift_cell: RunSpec, shift_file: Path) -> None:
    before, text = result_key(shift_cell), shift_file.read_text()
    try:
        shift_file.write_text(text.replace("mean = 400", "mean = 401"))
        assert result_key(shift_cell) != before
    finally:
        shift_file.write_text(text)
    assert result_key(shift_cell) == before


def test_a_changed_trace_changes_the_key(tmp_path: Path, small_cell: RunSpec) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("one")
    asked = small_cell.changed(workload=f"trace:{path}"), small_cell.changed(source=f"file:{path}")
    before = [result_key(cell) for cell in asked]
    path.write_text("two")
    assert not {result_key(cell) for cell in asked} & set(before)


def test_a_changed_module_of_the_users_own_policy_changes_the_key(
    tmp_path: Path, small_cell: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "policy_of_a_user" / "first.py"
    module.parent.mkdir()
    (module.parent / "__init__.py").touch()
    module.write_text("steps = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    cell = small_cell.changed(policy="policy_of_a_user.first:steps=3")
    before = result_key(cell)
    module.write_text("steps = 2")
    assert result_key(cell) != before


def test_a_stored_cell_is_a_run_like_any_other(store: RunStore, small_cell: RunSpec) -> None:
    found = store.get(small_cell)
    assert found is not None
    run = Run.load(found.path)
    assert run.manifest.policy == "v1"
    assert run.manifest.valid
    assert found.figures["completed"] == 40 == run.requests.num_rows


def test_a_store_can_keep_figures_without_runs(tmp_path: Path, small_cell: RunSpec) -> None:
    store = RunStore(tmp_path)
    run_missing([small_cell], store, workers=1, whole=False)
    found = store.get(small_cell)
    assert found is not None
    assert [path.name for path in found.path.iterdir()] == [CELL]
    assert found.get("request_throughput") > 0  # type: ignore[operator]
    with pytest.raises(DataError, match="only the figures"):
        _ = found.run
    assert run_missing([small_cell], store, workers=1, whole=False) == 0
    assert run_missing([small_cell], store, workers=1, whole=True) == 1, "the run itself was asked for"
    assert found.run.manifest.policy == "v1"


def test_a_pool_gives_what_one_process_gives(tmp_path: Path, small_cell: RunSpec) -> None:
    cells = [small_cell, small_cell.changed(seed=1)]
    run_missing(cells, RunStore(tmp_path / "one"), workers=1, whole=False)
    run_missing(cells, RunStore(tmp_path / "two"), workers=2, whole=False)
    for cell in cells:
        ours, theirs = RunStore(tmp_path / "one").get(cell), RunStore(tmp_path / "two").get(cell)
        assert ours is not None
        assert theirs is not None
        assert {**ours.figures, "run_dir": ""} == {**theirs.figures, "run_dir": ""}


def every_kind(kind: type[EbbenchError] = EbbenchError) -> list[type[EbbenchError]]:
    return [kind, *(one for sub in kind.__subclasses__() for one in every_kind(sub))]


@pytest.mark.parametrize("kind", every_kind(), ids=lambda kind: kind.__name__)
def test_errors_of_a_worker_keep_class_and_message(kind: type[EbbenchError]) -> None:
    own = {UnknownNameError: ("device", "h20", ["h200"]), InputFileError: ("a.csv", "is empty", 3)}
    error = kind(*own.get(kind, ("why it failed",)))
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert (str(back), back.args, vars(back)) == (str(error), error.args, vars(error))
    assert back.exit_code == error.exit_code


def test_a_pool_raises_the_error_that_one_process_raises(tmp_path: Path, small_cell: RunSpec) -> None:
    wrong = small_cell.changed(num_prompts=4, source="profil")
    for workers in (1, 2):
        with pytest.raises(UnknownNameError, match="did you mean 'profile'"):
            run_missing([wrong, wrong.changed(seed=1)], RunStore(tmp_path), workers=workers)


@pytest.mark.parametrize(
    "wrong", [{"device": "h20"}, {"model": "qwen3"}, {"workload": "balance"}, {"scenario": "poison"}], ids=str
)
def test_an_unknown_name_is_refused_before_the_first_run(
    tmp_path: Path, small_cell: RunSpec, wrong: dict[str, str]
) -> None:
    cells = [small_cell, small_cell.changed(**wrong, weight=0.1)]
    with pytest.raises(UnknownNameError):
        run_missing(cells, RunStore(tmp_path), workers=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("workers", [0, -1])
def test_no_workers_are_refused(tmp_path: Path, small_cell: RunSpec, workers: int) -> None:
    with pytest.raises(UsageError, match=f"--workers must be at least 1, not {workers}"):
        run_missing([small_cell], RunStore(tmp_path), workers=workers)


def test_the_error_on_a_request_that_never_fits_names_the_option(tmp_path: Path, small_cell: RunSpec) -> None:
    tiny = replace(small_cell, device="linear:0.001,0.00001,0.001,0.00001,480")
    with pytest.raises(UsageError, match=r"cannot run; drop longer ones with --max-model-len 480 --drop-too-long"):
        run_missing([tiny], RunStore(tmp_path), workers=1)
    fitting = tiny.changed(max_model_len=480, drop_too_long=True)
    assert run_missing([fitting], RunStore(tmp_path), workers=1, whole=False) == 1


def test_a_limit_of_the_plan_is_the_servers(small_cell: RunSpec) -> None:
    assert small_cell.changed(max_model_len=70_000).server.max_model_len == 70_000


def test_an_interrupted_run_is_not_stored(tmp_path: Path, small_cell: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Ctrl-C the engine returns a partial result, which must not be stored."""
    whole = SimEngine.run

    def cut_off(self: SimEngine, *args: object) -> EngineResult:
        return replace(whole(self, *args), interrupted=True)  # type: ignore[arg-type]

    monkeypatch.setattr(SimEngine, "run", cut_off)
    store = RunStore(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run_missing([small_cell], store, workers=1)
    assert store.get(small_cell) is None
    assert not list(tmp_path.iterdir())


def test_remains_of_killed_workers_are_cleared(tmp_path: Path, small_cell: RunSpec) -> None:
    old, new = tmp_path / ".cell-old", tmp_path / ".cell-new"
    for path in (old, new):
        path.mkdir()
    os.utime(old, (0, 0))
    run_missing([small_cell], RunStore(tmp_path), workers=1, whole=False)
    assert not old.exists()
    assert new.exists(), "another process may be at work in it"


def test_what_another_command_is_writing_is_left_alone(tmp_path: Path, small_cell: RunSpec) -> None:
    running = tmp_path / ".cell-running"
    running.mkdir()
    (running / "steps.part-0000.parquet").touch()
    os.utime(running, (0, 0))
    run_missing([small_cell], RunStore(tmp_path), workers=1, whole=False)
    assert running.exists()


def test_two_commands_can_run_the_same_cell_at_once(tmp_path: Path, small_cell: RunSpec) -> None:
    stores = [RunStore(tmp_path), RunStore(tmp_path)]
    tasks = [Task(small_cell, store.temporary(small_cell)) for store in stores]
    outcomes = [Outcome(make(task)) for task in tasks]
    found = [
        store.keep(small_cell, outcome, task.directory)
        for store, task, outcome in zip(stores, tasks, outcomes, strict=True)
    ]
    assert found[0].run.requests == found[1].run.requests
    assert [path.name for path in tmp_path.iterdir()] == [directory_name(small_cell)], "nothing else is left"


def test_a_result_stored_at_the_same_moment_is_no_error(
    tmp_path: Path, small_cell: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = RunStore(tmp_path), RunStore(tmp_path)
    outcome = Outcome(make(Task(small_cell)))
    rename = Path.rename

    def overtaken(self: Path, target: Path) -> Path:
        if target.name == directory_name(small_cell):
            monkeypatch.setattr(Path, "rename", rename)
            other.keep(small_cell, outcome)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", overtaken)
    assert store.keep(small_cell, outcome).figures == outcome.value.figures  # type: ignore[union-attr]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_damaged_cell_is_named(tmp_path: Path, small_cell: RunSpec) -> None:
    directory = tmp_path / directory_name(small_cell)
    directory.mkdir()
    (directory / CELL).write_text("{")
    with pytest.raises(DataError, match=directory_name(small_cell)):
        RunStore(tmp_path).get(small_cell)


def test_a_run_of_the_users_own_answers_the_cell_it_shares_a_plan_with(
    store: RunStore, small_cell: RunSpec, tmp_path: Path
) -> None:
    found = store.get(small_cell)
    assert found is not None
    adopting = RunStore(tmp_path, adopted=[found.path])
    taken = adopting.get(small_cell)
    assert taken is not None
    assert taken.path == found.path
    assert adopting.get(small_cell.changed(seed=1)) is None, "another seed is another plan"
    others: tuple[dict[str, object], ...] = (
        {"max_num_seqs": 32},
        {"max_num_batched_tokens": 1024},
        {"warmup": 4},
        {"async_scheduling": False},
        {"policy": "v0"},
        {"topology": "dp=2"},
    )
    for other in others:
        assert adopting.get(small_cell.changed(**other)) is None, other


def test_an_adopted_run_is_known_by_its_warmup_and_async_scheduling(
    store: RunStore, small_cell: RunSpec, tmp_path: Path
) -> None:
    """Manifests of older runs lack both options: these runs had the defaults."""
    cells = (small_cell, small_cell.changed(warmup=1), small_cell.changed(async_scheduling=False))
    recorded: tuple[dict[str, object], ...] = ({}, {"warmup": 1}, {"async_scheduling": False})
    for number, options in enumerate(recorded):
        run = copy_with_options(store, small_cell, tmp_path / f"old-{number}", options)
        adopting = RunStore(tmp_path / f"new-{number}", adopted=[run])
        answers = [adopting.get(cell) for cell in cells]
        assert [each and each.path for each in answers] == [run if place == number else None for place in range(3)]


def copy_with_options(store: RunStore, cell: RunSpec, folder: Path, options: dict[str, object]) -> Path:
    """The cell's run, its manifest recording of warm-up and async scheduling only these values."""
    found = store.get(cell)
    assert found is not None
    shutil.copytree(found.path, folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["options"] = {
        name: value for name, value in manifest["options"].items() if name not in ("warmup", "async_scheduling")
    } | options
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


def test_cell_json_holds_cell_and_key(store: RunStore, small_cell: RunSpec) -> None:
    found = store.get(small_cell)
    assert found is not None
    content = json.loads((found.path / CELL).read_text())
    assert content["cell"]["policy"] == "v1"
    assert content["key"] == result_key(small_cell)
