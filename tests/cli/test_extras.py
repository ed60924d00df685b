"""What a plain installation brings, what extras add, and what ``doctor`` says of both."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ebbench import doctor, installation
from ebbench.cli.main import app
from ebbench.errors import EbbenchError
from ebbench.installation import EXTRAS, Extra, need

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FOR_DEVELOPERS = {"dev"}


def names(requirements: list[str]) -> list[str]:
    return [match.group() for line in requirements if (match := re.match(r"[\w.-]+", line))]


def test_extras_are_those_of_the_project_file() -> None:
    declared = PROJECT["optional-dependencies"]
    assert {name: list(extra.distributions) for name, extra in EXTRAS.items()} == {
        name: names(requirements) for name, requirements in declared.items() if name not in FOR_DEVELOPERS
    }


@pytest.mark.parametrize("module", ["scipy", "pymannkendall", "duckdb", "jinja2", "altair", "datasets"])
def test_every_command_but_those_of_an_extra_works_without_one(module: str) -> None:
    assert module in names(PROJECT["dependencies"])


@pytest.mark.parametrize(
    ("extra", "command"), [("gateway", "pip install 'ebbench[gateway]'"), (None, "pip install ebbench")]
)
def test_a_missing_library_is_named_with_the_command(
    monkeypatch: pytest.MonkeyPatch, extra: str | None, command: str
) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(EbbenchError, match=re.escape(f"signals needs zmq; install it with: {command}")):
        need("zmq", "signals", extra)


def test_doctor_lists_each_extra_with_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"starlette": "1", "uvicorn": "1", "ray": "2"}

    def version(name: str) -> str:
        if name not in there:
            raise importlib.metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr("importlib.metadata.version", version)
    found = {finding.what: finding for finding in doctor.optional()}
    assert list(found) == list(EXTRAS)
    assert found["sweep"] == doctor.CheckResult("sweep", "ok", EXTRAS["sweep"].purpose)
    assert found["gateway"].state == "missing"
    assert found["gateway"].detail.endswith("missing here: pyzmq")
    assert found["gateway"].remedy == "pip install 'ebbench[gateway]'"


def test_doctor_names_a_library_that_was_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "own_distributions", lambda: ("numpy", "no-such-library"))
    assert doctor._libraries() == doctor.CheckResult(
        "libraries", "warn", "missing: no-such-library", "pip install ebbench"
    )


def test_doctor_prints_extras_whole_at_80_columns() -> None:
    page = CliRunner().invoke(app, ["doctor", "--quick"], env={"COLUMNS": "80"}).stdout
    assert "[gpu]" in page
    assert all(extra.purpose.split()[0] in page for extra in EXTRAS.values())
    found = json.loads(CliRunner().invoke(app, ["doctor", "--quick", "--json"]).stdout)
    assert [finding["what"] for finding in found["extras"]] == list(EXTRAS)


def test_an_extra_is_missing_by_its_distributions() -> None:
    assert Extra("x", ("numpy", "no-such-library"), "").missing() == ("no-such-library",)
