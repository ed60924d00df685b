"""Stored runs as things: listed, chosen, removed, moved, packed; a search with its probes is one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as replace_struct

from ebbench.errors import DataError, UsageError
from ebbench.records.run import MANIFEST, PARTIAL, VALIDATION, Run, RunWriter, find_runs
from ebbench.report.listing import document
from ebbench.runs.stored import Wanted, in_use, listed, meant, moment_ns, run_paths
from tests.gate.gate_data import invoke

DAY_NS = 86_400 * 10**9


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One small simulated run."""
    path = tmp_path_factory.mktemp("made") / "run"
    small = ("--policy", "v1", "--num-prompts", "8", "--max-concurrency", "4", "--quiet")
    done = invoke("run", "balanced", *small, "--output-dir", path)
    assert done.exit_code == 0, done.output
    return path


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small capacity search."""
    path = tmp_path_factory.mktemp("made") / "search"
    size = ("--num-prompts", "200", "--max-probes", "4", "--source", "profile", "--policy", "v1", "--quiet")
    done = invoke("capacity", "sharegpt", "--goodput", "ttft:2000", *size, "--output-dir", path)
    assert done.exit_code == 0, done.output
    return path


def copied(made: Path, target: Path, *, day: int = 0, labels: dict[str, Any] | None = None, **changes: Any) -> Path:
    """The run with another date, other labels and other entries of its manifest."""
    shutil.copytree(made, target)
    content = json.loads((target / MANIFEST).read_text())
    content |= {"anchor_unix_ns": day * DAY_NS, "labels": labels or {}, **changes}
    (target / MANIFEST).write_text(json.dumps(content))
    return target


@pytest.fixture
def shelf(made: Path, tmp_path: Path) -> Path:
    """Three runs, a damaged one, a foreign directory, and a file."""
    root = tmp_path / "runs"
    copied(made, root / "one", day=3, labels={"name": "first", "tags": ["nightly"]}, workload="sharegpt")
    copied(made, root / "group" / "two", day=2, labels={"tags": ["nightly", "gpu"]}, policy="eb", device="h200")
    copied(made, root / "three", day=1, valid=False)
    (root / "broken").mkdir()
    (root / "broken" / MANIFEST).write_text("{")
    (root / "thesis").mkdir()
    (root / "thesis" / "chapter.tex").write_text("text")
    (root / "readme.txt").write_text("text")
    return root


def names(root: Path, *words: str) -> list[str]:
    done = invoke("runs", "--runs", root, "--json", *words)
    assert done.exit_code == 0, done.output
    return [Path(run["path"]).name for run in json.loads(done.stdout)["runs"]]


def test_a_validation_is_named_and_its_runs_can_be_shown(shelf: Path) -> None:
    """Its own manifest was taken for a damaged run's, also by ``show`` of its directory."""
    folder = shelf / "validation"
    (folder / "measured").mkdir(parents=True)
    for name in (MANIFEST, VALIDATION):
        (folder / name).write_text("{}")
    shutil.copytree(shelf / "one", folder / "measured" / "v1")
    assert listed([shelf]).problems[folder].startswith("a validation; ")
    assert [run.path.name for run in listed([folder / "measured"]).runs] == ["v1"]
    assert find_runs([folder]) == [folder / "measured" / "v1"]
    assert folder not in find_runs([shelf])


def test_a_list_names_what_it_leaves_out(shelf: Path) -> None:
    found = listed([shelf])
    assert [run.path.name for run in found.runs] == ["one", "two", "three"]
    assert {path.name for path in found.problems} == {"broken", "thesis"}
    assert found.problems[shelf / "thesis"] == "holds no run"
    done = invoke("runs", "--runs", shelf)
    assert done.exit_code == 0
    assert "3 runs" in done.stdout
    assert "broken: manifest.json: not a manifest" in done.stderr


def test_filters_and_orders_of_a_list(shelf: Path) -> None:
    assert names(shelf, "--tag", "nightly") == ["one", "two"]
    assert names(shelf, "--tag", "nightly", "--tag", "gpu") == ["two"]
    assert names(shelf, "--workload", "share*") == ["one"]
    assert names(shelf, "--policy", "eb", "--device", "H200") == ["two"]
    assert names(shelf, "--since", "1970-01-03") == ["one", "two"]
    assert names(shelf, "--before", "1970-01-03") == ["three"]
    assert names(shelf, "--invalid") == ["three"]
    assert names(shelf, "--sort", "workload", "--reverse")[0] == "one"
    assert names(shelf, "--last", "1") == ["one"]
    assert set(names(shelf, "--sort", "size")) == {"one", "two", "three"}
    unknown = invoke("runs", "--runs", shelf, "--sort", "colour")
    assert (unknown.exit_code, "colour" in unknown.stderr) == (2, True)


def test_a_list_needs_no_table_of_a_run(shelf: Path) -> None:
    for path in shelf.rglob("*.parquet"):
        path.write_bytes(b"")
    assert len(listed([shelf]).runs) == 3


def test_a_narrow_list_keeps_what_tells_runs_apart(shelf: Path) -> None:
    shown = document(listed([shelf]), width=48)
    [section] = shown.sections
    assert [column.name for column in section.columns] == ["run", "name", "tags", "state", "size"]
    assert section.rows[1][0] == "group/two"
    assert "not shown in this width: begun (UTC)" in shown.notes[0]


def test_names_directories_and_paths_mean_runs(shelf: Path) -> None:
    assert [run.path.name for run in meant(["first"], [shelf]).runs] == ["one"]
    assert [run.path.name for run in meant(["two", str(shelf / "one")], [shelf]).runs] == ["two", "one"]
    assert len(meant([str(shelf)], []).runs) == 3
    with pytest.raises(UsageError, match="first"):
        meant(["frist"], [shelf])
    with pytest.raises(DataError, match="no run"):
        meant([str(shelf / "thesis")], [shelf])


@pytest.fixture
def nightly(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """runs/ of two nights of one name, each v1 and eb on one plan, the second one of another commit."""
    for night, commit in ((1, "aaa"), (2, "bbb")):
        for policy in ("v1", "eb"):
            labels = {"name": "nightly", "commit": commit}
            copied(made, tmp_path / "runs" / f"{policy}-{night}", day=night, labels=labels, policy=policy)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def test_a_name_is_its_newest_measurement(nightly: Path) -> None:
    told: list[str] = []
    assert {path.name for path in run_paths(["nightly"], told.append)} == {"v1-2", "eb-2"}
    assert "the newest 2 of 4" in told[0]
    copied(nightly / "v1-2", nightly / "v1-3", day=3, labels={"name": "nightly", "commit": "bbb"})
    assert [path.name for path in run_paths(["nightly"], told.append)] == ["v1-3"]


def test_a_directory_is_itself_although_a_run_has_its_name(nightly: Path, tmp_path: Path) -> None:
    (tmp_path / "nightly").mkdir()
    assert run_paths(["nightly"], print) == [Path("nightly")]


@pytest.mark.parametrize(
    "words", [("show",), ("report", "-o", "page.html"), ("query", "select policy from runs", "--runs"), ("trend",)]
)
def test_commands_take_a_name_for_a_directory(nightly: Path, words: tuple[str, ...]) -> None:
    done = invoke(*words, "nightly")
    assert done.exit_code == 0, done.output
    assert words[0] == "trend" or "the newest 2 of 4 runs of that name" in done.stderr
    unknown = invoke(*words, "nightli")
    assert unknown.exit_code in (2, 3)
    assert "did you mean 'nightly'?" in unknown.stderr


def test_sides_of_a_comparison_and_of_the_gate_may_be_names(made: Path, nightly: Path) -> None:
    for policy in ("v1", "eb"):
        copied(made, nightly / f"{policy}-new", day=4, labels={"name": "change", "commit": "ccc"}, policy=policy)
    compared = invoke("compare", "nightly", "change", "--json")
    assert compared.exit_code == 0, compared.output
    assert "v1 (change)" in compared.stdout
    judged = invoke("gate", "nightly", "change", "--policy", "v1")
    assert judged.exit_code == 5, judged.output
    assert "1 pairs" in judged.stdout or "1 pair" in judged.stdout


def test_nothing_is_removed_before_one_says_yes(shelf: Path) -> None:
    done = invoke("runs", "rm", "first", "--runs", shelf)
    assert (done.exit_code, "--yes" in done.stderr) == (2, True)
    assert (shelf / "one").is_dir()
    assert invoke("runs", "rm", "first", "--runs", shelf, "--yes").exit_code == 0
    assert not (shelf / "one").exists()
    assert (shelf / "group" / "two").is_dir()


def test_what_is_no_run_is_never_removed(shelf: Path) -> None:
    (shelf / "one" / "notes.md").write_text("mine")
    (shelf / "one" / "mine").mkdir()
    done = invoke("runs", "rm", shelf / "one", "--runs", shelf, "--yes")
    assert "left in place" in done.stderr
    assert sorted(path.name for path in (shelf / "one").iterdir()) == ["mine", "notes.md"]
    assert invoke("runs", "rm", shelf / "thesis", "--yes").exit_code == 3
    assert invoke("runs", "rm", shelf, "--yes").exit_code == 0
    assert {path.name for path in shelf.iterdir()} == {"broken", "thesis", "readme.txt", "one", "group"}


@pytest.mark.parametrize("reference", [".", "..", "above"])
def test_the_directory_that_one_is_in_is_not_emptied(
    reference: str, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is named ``..`` was looked for: what ``..`` is went, with the runs of everybody."""
    monkeypatch.chdir(shelf / "group")
    named = str(shelf.parent) if reference == "above" else reference
    for command in (("rm", named, "--yes"), ("move", named, "--to", shelf / "group" / "new")):
        done = invoke("runs", *command)
        assert (done.exit_code, "in which you are" in done.stderr) == (2, True), done.output
    assert (shelf / "group" / "two").is_dir()


def test_a_run_that_is_being_made_is_left_alone(made: Path, tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "run") as writer:
        assert in_use(tmp_path / "run")
        shutil.copy(made / MANIFEST, tmp_path / "run" / PARTIAL)
        refused = invoke("runs", "rm", tmp_path / "run", "--yes")
        assert (refused.exit_code, "in use" in refused.stderr) == (2, True)
        writer.append("steps", Run.load(made).steps)
    assert (tmp_path / "run" / PARTIAL).exists()


def test_a_run_of_a_directory_in_use_is_left_alone(made: Path, tmp_path: Path) -> None:
    copied(made, tmp_path / "side" / "pair-001")
    code = "import sys, time\nfrom pathlib import Path\nfrom ebbench.records.files import sole_use\n"
    code += "with sole_use(Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "side")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert in_use(tmp_path / "side" / "pair-001")
        holder.communicate(b"")
    assert not in_use(tmp_path / "side" / "pair-001")


def test_prune_keeps_the_newest_and_the_young(shelf: Path) -> None:
    def left() -> set[str]:
        return {run.path.name for run in listed([shelf]).runs}

    assert invoke("runs", "prune", "--runs", shelf, "--yes").exit_code == 2
    shown = invoke("runs", "prune", "--runs", shelf, "--keep-last", "1", "--dry-run")
    assert ("two" in shown.stdout, left()) == (True, {"one", "two", "three"})
    assert invoke("runs", "prune", "--runs", shelf, "--invalid", "--yes").exit_code == 0
    assert left() == {"one", "two"}
    assert invoke("runs", "prune", "--runs", shelf, "--older-than", "1970-01-03", "--yes").exit_code == 0
    assert left() == {"one", "two"}
    assert invoke("runs", "prune", "--runs", shelf, "--keep-last", "1", "--tag", "nightly", "--yes").exit_code == 0
    assert left() == {"one"}


def test_runs_are_moved_and_packed(shelf: Path, tmp_path: Path) -> None:
    archive = tmp_path / "runs.tar.gz"
    assert invoke("runs", "export", "first", "--runs", shelf, "-o", archive).exit_code == 0
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path / "unpacked", filter="data")
    assert Run.load(tmp_path / "unpacked" / "one").manifest.labels.name == "first"
    assert invoke("runs", "move", "first", "two", "--runs", shelf, "--to", tmp_path / "old").exit_code == 0
    assert sorted(path.name for path in (tmp_path / "old").iterdir()) == ["one", "two"]
    assert not (shelf / "one").exists()
    copied(tmp_path / "old" / "one", shelf / "one")
    refused = invoke("runs", "move", "one", "--runs", shelf, "--to", tmp_path / "old")
    assert (refused.exit_code, (shelf / "one").is_dir()) == (2, True)


def test_a_search_with_its_probes_is_one_row(search: Path) -> None:
    [entry] = listed([search.parent]).runs
    assert (entry.kind, entry.policy, entry.valid) == ("search", "v1", True)
    assert entry.probes == len(list(search.glob("*/manifest.json")))
    assert find_runs([search.parent]) == []
    assert len(find_runs([search])) == entry.probes
    assert "limited by" in invoke("runs", "show", search).stdout
    alone = invoke("show", search.parent)
    assert (alone.exit_code, "capacity searches" in alone.stderr) == (3, True)
    assert invoke("show", search).exit_code == 0


def test_a_search_keeps_of_its_probes_what_it_reads(search: Path) -> None:
    """The probe nearest to capacity keeps all; the others can be shown, and the search goes on from them."""
    [row] = json.loads((search / "capacity-answers.json").read_text())
    nearest = Path(row["nearest_run_dir"]).name
    steps = {path.name: Run.load(path).steps.num_rows for path in search.glob("*-seed*")}
    assert steps.pop(nearest) > 0
    assert set(steps.values()) == {0}
    shown = invoke("show", search / next(iter(steps)))
    assert shown.exit_code == 0
    assert "no steps" in " ".join(shown.stdout.split())
    again = invoke(
        "capacity", "sharegpt", "--goodput", "ttft:2000", "--num-prompts", "200", "--max-probes", "4", "--source",
        "profile", "--policy", "v1", "--quiet", "--json", "--output-dir", search,
    )  # fmt: skip
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)[0]["capacity_requests_per_s"] == row["capacity_requests_per_s"]


def test_a_search_of_one_probe_has_one_probe(search: Path) -> None:
    [run] = listed([search]).runs
    assert replace_struct(run, probes=1).state == "search, 1 probe"
    assert replace_struct(run, probes=2).state == "search, 2 probes"


def test_pruning_probes_leaves_every_run_and_takes_no_other_choice(search: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(search, tmp_path / "runs" / "copy")
    prune = ("runs", "prune", "--runs", copy.parent, "--probes")
    for given in (("--keep-last", "1"), ("--older-than", "30d"), ("--dry-run",)):
        refused = invoke(*prune, *given)
        assert (refused.exit_code, given[0] in refused.output) == (2, True)
    [row] = json.loads((copy / "capacity-answers.json").read_text())
    whole = copy / Path(row["nearest_run_dir"]).name
    other = shutil.copytree(whole, copy / "superseded-seed1")
    pruned = invoke(*prune)
    assert (pruned.exit_code, "of 1 searches" in pruned.stdout) == (0, True)
    assert Run.load(other).steps.num_rows == 0
    assert Run.load(whole).steps.num_rows > 0


def test_removing_a_search_removes_its_probes(search: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(search, tmp_path / "copy")
    assert invoke("runs", "rm", copy, "--yes").exit_code == 0
    assert not copy.exists()


def test_many_unlike_runs_begin_with_a_list(made: Path, tmp_path: Path) -> None:
    for place, device in enumerate(("h200", "l40s", "h100", "b200")):
        copied(made, tmp_path / "runs" / device, day=place, device=device)
    shown = invoke("show", tmp_path / "runs").stdout
    assert shown.startswith("4 runs, ")
    assert all(device in shown for device in ("h200", "l40s", "h100", "b200"))


def test_ages_and_dates() -> None:
    now = datetime(2026, 11, 27, tzinfo=UTC)
    assert moment_ns("--since", "2d", now) == int(datetime(2026, 11, 25, tzinfo=UTC).timestamp() * 1e9)
    assert moment_ns("--since", "2026-11-25", now) == moment_ns("--since", "2d", now)
    with pytest.raises(UsageError, match="--since"):
        moment_ns("--since", "yesterday")


def test_a_search_matches_by_any_of_its_policies(search: Path) -> None:
    [entry] = listed([search.parent]).runs
    assert Wanted(policy="v1").matches(entry)
    assert not Wanted(policy="eb").matches(entry)
