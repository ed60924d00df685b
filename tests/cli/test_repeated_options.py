"""An option of one value is given once, in every command; options that collect values are not affected."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.core import TyperOption
from typer.testing import CliRunner

from ebbench.cli.main import COMMANDS, app, load_command
from ebbench.errors import UsageError
from ebbench.spec.client import read_headers


def leaves(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The commands without commands below them, by path."""
    below = getattr(command, "commands", {})
    for name, one in below.items():
        yield from leaves(one, f"{path} {name}")
    if not below:
        yield path, command


def parse(command: Any, words: list[str]) -> str:
    """Parse alone; the usage error's message, or empty."""
    context = typer.Context(command, info_name=command.name)
    try:
        command.make_parser(context).parse_args(args=words)
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_one_value_is_refused_twice(name: str) -> None:
    for path, command in leaves(load_command(name), name):
        for option in command.params:
            if not isinstance(option, TyperOption) or option.is_flag:
                continue
            said = parse(command, [option.opts[0], "1", f"{option.opts[0]}", "2"])
            expected = "" if option.multiple else f"{option.opts[0]} takes one value and is given 2 times"
            assert bool(said) == bool(expected), f"ebbench {path} {option.opts[0]}: {said!r}"
            assert expected in said


@pytest.mark.parametrize(
    "words", [["--seed", "1", "--seed=2"], ["-n", "5", "--num-prompts", "6"], ["-n5", "-n6"], ["--seed", "1"] * 3]
)
def test_every_spelling_of_an_option_counts_as_a_repeat(words: list[str]) -> None:
    done = CliRunner().invoke(app, ["run", "balanced", "--policy", "v1", *words])
    assert done.exit_code == 2
    assert "give it once" in done.output


def test_flags_may_repeat_but_not_contradict() -> None:
    run = load_command("run")
    assert parse(run, ["-q", "--quiet", "--ignore-eos", "--ignore-eos"]) == ""
    assert "--ignore-eos and --no-ignore-eos contradict" in parse(run, ["--ignore-eos", "--no-ignore-eos"])


def test_options_of_vllm_after_two_dashes_are_not_judged() -> None:
    assert parse(load_command("run"), ["balanced", "--seed", "1", "--", "--seed", "2", "--seed", "3"]) == ""


def test_a_header_is_given_once() -> None:
    with pytest.raises(UsageError, match="x-team is given twice"):
        read_headers(["X-Team=a", "x-team=b"])
