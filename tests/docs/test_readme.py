"""The README: its commands parse, its links lead somewhere, and its figures are those of the reports it names."""

from __future__ import annotations

import re
import shlex
import struct
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ebbench.cli import main

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PICTURES = ("docs/pictures/comparison.png", "docs/pictures/over-time.png")


def test_every_command_is_understood() -> None:
    lines = [line for block in re.findall(r"^```bash\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
             for line in block.splitlines()]  # fmt: skip
    assert len(lines) >= 6
    for line in lines:
        program, name, *arguments = shlex.split(line, comments=True)
        assert program == "ebbench"
        with main.load_command(name).make_context(name, arguments) as context:
            assert context.params


def test_links_and_pictures_are_there() -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", README)
    assert set(PICTURES) <= set(targets)
    for target in (*targets, *re.findall(r"`((?:reports|docs)/[\w./-]+)`", README)):
        assert (ROOT / target).exists(), target
    for picture in PICTURES:
        width, height = struct.unpack(">II", (ROOT / picture).read_bytes()[16:24])
        assert width > 600
        assert height > 200
    assert re.search(r"^picture:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def test_figures_are_those_of_the_reports() -> None:
    fidelity = (ROOT / "reports/fidelity/README.md").read_text(encoding="utf-8")
    rows = {line.split("|")[2].strip(): line.split("|")[4].strip() for line in fidelity.splitlines()
            if line.startswith("| predicted rows |")}  # fmt: skip
    error, winner = rows["median error of throughput"], rows["same winner where the published gap exceeds 2 %"]
    prose = " ".join(README.split())
    assert f"median error of throughput is {error.replace('%', ' %')}" in prose
    assert f"the same in {winner.replace('%', ' %')} of cases" in prose
    pairs, right = re.search(r"^\| predicted rows \| 2% \| (\d+) \| (\d+) \|", fidelity, re.MULTILINE).groups()  # type: ignore[union-attr]
    assert f"same sign in {right} of {pairs} cases" in prose
    per_token = [
        (float(ours), float(theirs))
        for table in re.findall(r"\| ebbench \|.*?\| guidellm[^\n]*", client_report(), re.DOTALL)
        for ours, theirs in zip(cells(table.splitlines()[0]), cells(table.splitlines()[-1]), strict=False)
    ]
    assert len(per_token) >= 4
    assert all(ours <= theirs / 5 for ours, theirs in per_token), "a sixth of GuideLLM's, to the precision of rounds"


def client_report() -> str:
    return (ROOT / "reports/client.md").read_text(encoding="utf-8").split("Against the targets")[0]


def cells(line: str) -> list[str]:
    """CPU per token of each round."""
    return [part.strip() for part in line.split("|")[2].split("/")]


@pytest.mark.slow
def test_the_table_is_what_make_run_prints(tmp_path: Path) -> None:
    """The command of the Makefile, with lengths that need no network, as the README says of its table."""
    words = re.search(r"bin/ebbench (run .*)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert words is not None
    command = [*shlex.split(words[1]), "--source", "profile", "--quiet", "-o", str(tmp_path / "runs")]
    done = CliRunner().invoke(main.app, command, env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    (table,) = re.findall(r"^policy +whole .*?(?=^```$)", README, re.MULTILINE | re.DOTALL)
    assert len(table.splitlines()) == 5
    printed = {" ".join(line.split()) for line in done.stdout.splitlines()}
    assert [line for line in table.splitlines() if " ".join(line.split()) not in printed] == []
