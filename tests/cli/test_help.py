"""``--help`` of every command in a terminal of 80 columns: no option name is truncated."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from ebbench.cli import main

WIDTH = 80


def commands(words: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """A command and its subcommands, with the words that call them."""
    yield words, command
    for name, sub in getattr(command, "commands", {}).items():
        yield from commands((*words, name), sub)


EVERY = [pair for name in main._Commands().list_commands(None) for pair in commands((name,), main.load_command(name))]


def shown(words: tuple[str, ...], option: str = "--help") -> str:
    done = CliRunner().invoke(main.app, [*words, option], env={"COLUMNS": str(WIDTH), "TERMINAL_WIDTH": None})
    assert done.exit_code == 0, done.output
    return re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)  # some CI services force colours


@pytest.mark.parametrize(("words", "command"), EVERY, ids=[" ".join(words) for words, _ in EVERY])
def test_every_option_name_is_whole_at_80_columns(words: tuple[str, ...], command: Any) -> None:
    page = shown(words, "--help-all" if getattr(command, "everyday", ()) else "--help")
    assert max(map(len, page.splitlines())) <= WIDTH
    assert "…" not in page
    whole = set(re.findall(r"(?<![\w-])-{1,2}[a-z][\w-]*", page))
    for param in command.params:
        if param.param_type_name == "option" and not param.hidden:
            assert {*param.opts, *param.secondary_opts} <= whole, param.name


@pytest.mark.parametrize("name", ["run", "capacity"])
def test_help_of_commands_that_make_runs_has_the_everyday_options(name: str) -> None:
    page, command = shown((name,)), main.load_command(name)
    options = [param for param in command.params if param.param_type_name == "option"]
    everyday = [param for param in options if f" {param.opts[0]} " in page]
    assert 15 <= len(everyday) <= 25
    assert re.search(r"\d+ more options: ", page)


def test_help_all_after_the_options_for_vllm_is_theirs() -> None:
    done = CliRunner().invoke(main.app, ["run", "balanced", "--engine", "sim", "--", "--help-all"])
    assert "--help-all" in done.stderr
    assert done.exit_code == 2


def test_names_of_the_program_itself_are_whole() -> None:
    page = shown(())
    assert "…" not in page
    assert all(f"│ {name} " in page for name in main.COMMANDS)


def test_a_flag_shows_no_value_and_whether_it_is_on() -> None:
    page = shown(("devices", "show"))
    assert "<bool>" not in page
    assert re.search(r"--enforce-eager +Do not use CUDA graphs", page)
    assert "[default: (on)]" in page


def test_help_changes_nothing_that_is_parsed() -> None:
    command = main.load_command("run")
    before = {param.name: (list(param.opts), list(param.secondary_opts)) for param in command.params}
    assert CliRunner().invoke(main.app, ["run", "--help"]).exit_code == 0
    with command.make_context("run", ["sharegpt", "--keep-prefix-cache", "--ready-check-timeout-sec", "3"]) as context:
        assert context.params["reset_prefix_cache"] is False
        assert context.params["ready_timeout_s"] == 3
    assert {param.name: (list(param.opts), list(param.secondary_opts)) for param in command.params} == before


def test_help_says_sessions_where_options_count_sessions() -> None:
    """A conversation is one session of several requests; how many there are by default depends on the workload."""
    page = re.sub(r"[│\s]+", " ", shown(("run",)))
    assert re.search(r"--num-prompts -n (<int>|INTEGER) Sessions to plan", page)
    assert re.search(r"--request-rate (<float>|FLOAT) Sessions/s", page)
    assert "4,000" not in page
