"""`ebbench tables` from the command line, on table 3 with few requests."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ebbench.cli.main import app
from ebbench.errors import UsageError
from ebbench.papers.options import PaperOptions
from ebbench.papers.registry import FIGURES, TABLES, find_table
from ebbench.papers.table import PaperFigure, PaperTable
from ebbench.render.documents import as_csv
from ebbench.runs.store import Measured, RunStore

COUNT = 60
SMALL = ("--device", "h200", "--num-prompts", str(COUNT), "--workers", "1", "-q")


def invoke(*args: str) -> Result:
    return CliRunner().invoke(app, list(args), env={"COLUMNS": "160"})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runs directory that holds a small table 3."""
    root = tmp_path_factory.mktemp("table3")
    done = invoke("tables", "3", "--run", "--runs", str(root), *SMALL)
    assert done.exit_code == 0, done.output
    return root


def test_the_list_names_every_table() -> None:
    said = invoke("tables").output
    assert all(table.name in said for table in TABLES)


def test_published_ours_and_difference_stand_side_by_side(made: Path) -> None:
    """As in the document of the published setting; the command leaves print out where fewer requests were run."""
    document = find_table("3").document(PaperOptions(devices=("h200",), num_prompts=COUNT), RunStore(made))
    rows = list(csv.DictReader(io.StringIO(as_csv(document).split("\n\n")[0])))
    first = next(row for row in rows if row["scenario"] == "c = 32" and row["metric"] == "tokens/s")
    assert float(first["v1_published"]) == 11584
    ours = float(first["v1_ours"])
    assert float(first["v1_diff"]) == pytest.approx(ours / 11584 - 1)
    assert float(first["v0_ours"]) > 0
    assert len(rows) == 15


def test_another_setting_is_titled_and_has_no_published_columns(made: Path) -> None:
    text = invoke("tables", "3", "--runs", str(made), *SMALL, "-f", "markdown").output
    assert f"({COUNT} requests a run)" in text.splitlines()[0]
    assert "no published figures stand beside it" in text
    assert "11,584" not in text
    assert "v1 diff" not in text
    assert "v1 ours" in text


@pytest.mark.parametrize(("name", "device"), [("10", "h100"), ("11", "rtx-pro-6000"), ("13", "h200")])
def test_another_device_does_not_stand_beside_published_figures(name: str, device: str, tmp_path: Path) -> None:
    text = invoke("tables", name, "--runs", str(tmp_path), "--device", device, "-f", "markdown").output
    assert f"(device {device})" in text.splitlines()[0]
    assert "published |" not in text


REFUSED = {
    ("table8", "device"), ("adaptation", "device"), ("table8", "model"), ("table5", "model"),
    ("table6", "model"), ("table7", "model"),
}  # fmt: skip
"""Tables that have no costs, no load or no row for it, by option."""
OTHERS = {"device": PaperOptions(devices=("h100",)), "model": PaperOptions(models=("qwen2.5-7b",))}


@pytest.mark.parametrize("option", OTHERS)
@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_what_was_not_published_is_titled_or_refused(table: PaperTable, option: str, tmp_path: Path) -> None:
    """A device or model that print does not have is named in the title, and no published value stands beside it."""
    if option not in table.reads:
        return
    name = {"device": "h100", "model": "qwen2.5-7b"}[option]
    if (table.name, option) in REFUSED:
        with pytest.raises(UsageError, match=name):
            table.filled(OTHERS[option], RunStore(tmp_path))
        return
    document = table.filled(OTHERS[option], RunStore(tmp_path))
    assert f"({option} " in document.title
    for section in document.sections:
        for at, column in enumerate(section.columns):
            of_print = column.name == "published" or column.group.startswith("published")
            assert not of_print or all(row[at] is None for row in section.rows)


def test_differences_between_our_own_figures_stay(tmp_path: Path) -> None:
    document = find_table("cluster-policies").filled(PaperOptions(num_prompts=50), RunStore(tmp_path))
    assert "(50 requests a run)" in document.title
    assert document.notes[0] == "Run with 50 requests a run instead of the table's own setting."
    assert "diff" in {column.name for column in document.sections[0].columns}
    document = find_table("11").filled(PaperOptions(num_prompts=50), RunStore(tmp_path))
    assert "diff" not in {column.name for column in document.sections[0].columns}


def test_one_published_device_keeps_its_figures_beside_another(tmp_path: Path) -> None:
    document = find_table("2").filled(PaperOptions(devices=("h200", "h100")), RunStore(tmp_path))
    assert document.title.endswith("(device h100)")
    values = [row[2] for section in document.sections for row in section.rows if isinstance(row[2], float)]
    assert max(values) == 21.31, "v0 on H200; none for the H100"
    assert len(values) == 8


def test_missing_runs_are_counted_and_their_cells_left_empty(tmp_path: Path) -> None:
    said = invoke("tables", "3", "--runs", str(tmp_path), "-f", "markdown")
    assert said.exit_code == 0
    assert "90 of 90 runs have not been made" in said.output
    assert "| 13,549 | – | – |" in said.output


@pytest.mark.parametrize("style", ["rich", "markdown", "latex", "html", "csv"])
def test_every_format_can_be_written_to_a_file(made: Path, tmp_path: Path, style: str) -> None:
    path = tmp_path / f"table.{style}"
    done = invoke("tables", "table3", "--runs", str(made), *SMALL, "-f", style, "-o", str(path))
    assert done.exit_code == 0, done.output
    assert "c = 512" in path.read_text()


def test_tables_of_the_users_runs_by_phase_and_over_targets(shift_run: Measured) -> None:
    by_phase = invoke("tables", "phases", "--from", str(shift_run.path))
    assert "prompts" in by_phase.output
    assert "answers" in by_phase.output
    targets = invoke("tables", "slo", "--from", str(shift_run.path), "--ttft", "1,60", "--tpot", "20,500", "--by-phase")
    assert targets.output.count("TTFT ≤") == 3
    assert "100.0" in targets.output


def test_a_table_reads_the_users_own_runs(made: Path, tmp_path: Path) -> None:
    """Runs made elsewhere stand for the cells whose plan and settings they share."""
    said = invoke("tables", "3", "--runs", str(tmp_path), "--from", str(made), *SMALL, "-f", "markdown").output
    assert "have not been made" not in said


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("tables", "tabel3"), "did you mean 'table3'"),
        (("tables", "3", "-f", "docx"), "unknown format"),
        (("tables", "2", "--outputs", "forcd"), "did you mean 'forced'"),
        (("tables", "phases"), "needs runs"),
        (("tables", "18", "--ttft", "two"), "--ttft: 'two' is not valid; write a number above 0, e.g. 2,5,10"),
        (("tables", "3", "--device", "h2000", "--run"), "did you mean 'h200'"),
        (("tables", "3", "--device", "h2000"), "did you mean 'h200'"),
        (("tables", "3", "--model", "qwen3-9b"), "unknown model 'qwen3-9b'"),
        (("tables", "3", "--workload", "nosuch"), "table3 does not use --workload; it uses --device, --model"),
        (("tables", "3", "--source", "profile"), "table3 does not use --source"),
        (("tables", "2", "--workload", "nosuch"), "unknown workload 'nosuch'"),
        (("tables", "cluster-policies", "--workload", "sharegpt"), "known: balanced, decode-heavy, prefill-heavy"),
        (("tables", "13", "--device", "h200", "--device", "l40s"), "takes one --device, not h200 and l40s"),
        (("tables", "e3", "--seeds", "1"), "--seeds must be at least 3 here"),
        (("tables", "phases", "--ttft", "2"), "`ebbench tables phases` does not use --ttft; leave it out"),
        (("tables", "slo", "--run"), "does not use --run; it uses --ttft, --tpot, --by-phase"),
        (("tables", "--seeds", "2"), "without a table's name `ebbench tables` does not use --seeds"),
        (("tables", "99"), "slo, table10"),
    ],
)
def test_mistakes_are_answered_with_the_remedy(args: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = invoke(*args, "--runs", str(tmp_path))
    assert done.exit_code != 0
    assert message in " ".join((done.output, str(done.exception)))


class Watched(PaperOptions):
    """Options that note which of its fields are read."""

    def __getattribute__(self, name: str) -> object:
        seen: set[str] = object.__getattribute__(self, "__dict__").setdefault("seen", set())
        seen.add(name)
        return object.__getattribute__(self, name)


FIELDS = {
    "devices": "device", "models": "model", "workloads": "workload", "policies": "policy", "num_prompts": "num_prompts",
    "seeds": "seeds", "grid": "grid", "outputs": "outputs", "source": "source", "ttft_s": "ttft", "tpot_ms": "tpot",
}  # fmt: skip


@pytest.mark.parametrize("table", [*TABLES, *FIGURES], ids=lambda table: table.name)
def test_a_table_reads_exactly_the_options_it_declares(table: PaperTable | PaperFigure, tmp_path: Path) -> None:
    options, store = Watched(num_prompts=50, outputs="profile"), RunStore(tmp_path)
    options.__dict__["seen"].clear()  # what is checked when they are made
    if isinstance(table, PaperTable):
        table.document(options, store)  # asks for the runs, too
    else:
        table.chart(options, store, True)
    read = {FIELDS[name] for name in options.__dict__["seen"] & set(FIELDS)}
    assert set(table.reads) == read


def test_a_stored_cell_survives_a_second_process_finishing_first(made: Path) -> None:
    assert RunStore(made).root.exists()
    assert not list(made.glob(".cell-*")), "no unfinished directory is left"
