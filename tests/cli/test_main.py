"""The console entry: fast help, one line per error, the right exit code."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ebbench.cli import main
from ebbench.errors import DataError, EbbenchError, InterruptedRunError, RunError, UsageError
from ebbench.process.command_line import CommandEntry, exit_code, expand_goodput, wrapped
from vllm_eb.policy import PolicyError, descriptions, policy_types


@pytest.fixture
def cli() -> CliRunner:
    return CliRunner()


def raising(error: BaseException) -> Callable[[], None]:
    def command() -> None:
        raise error

    return command


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Replaces `ebbench show` by something that raises."""

    def replace(error: BaseException) -> None:
        import ebbench.cli.show as module

        monkeypatch.setattr(module, "show", raising(error))

    return replace


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("do this"), 2),
        (DataError("do this"), 3),
        (RunError("do this"), 4),
        (EbbenchError("do this"), 4),
        (InterruptedRunError("do this"), 130),
        (PolicyError("do this"), 2),
    ],
)
def test_every_error_is_one_line_and_its_exit_code(
    cli: CliRunner, command: Callable[[BaseException], None], error: BaseException, code: int
) -> None:
    command(error)
    done = cli.invoke(main.app, ["show"])
    assert (done.exit_code, done.stderr, done.stdout) == (code, "error: do this\n", "")


def test_an_interrupt_outside_a_run_is_130_and_said(cli: CliRunner, command: Callable[[BaseException], None]) -> None:
    command(KeyboardInterrupt())
    done = cli.invoke(main.app, ["show"])
    assert (done.exit_code, done.stderr) == (130, "error: interrupted\n")


def test_an_interrupt_while_the_command_line_loads_is_no_traceback() -> None:
    code = "import builtins, signal\nloading = builtins.__import__\n" \
           "def press(name, *rest):\n" \
           "    if name == 'typer':\n        signal.raise_signal(signal.SIGINT)\n" \
           "    return loading(name, *rest)\n" \
           "builtins.__import__ = press\nfrom ebbench.__main__ import run\nrun()"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "ebbench", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[0]) == (0, "ebbench")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (FileNotFoundError(2, "No such file or directory", "a/b.png"), "error: a/b.png: No such file or directory\n"),
        (OSError(28, "No space left on device"), "error: No space left on device\n"),
        (
            MemoryError("Unable to allocate 15 GiB"),
            "error: not enough memory (Unable to allocate 15 GiB); ask for fewer requests (--num-prompts) or fewer "
            "--workers\n",
        ),
    ],
)
def test_an_operating_system_error_is_one_line(
    cli: CliRunner, command: Callable[[BaseException], None], error: Exception, line: str
) -> None:
    command(error)
    done = cli.invoke(main.app, ["show"])
    assert (done.exit_code, done.stderr) == (4, line)


def test_a_closed_output_pipe_does_not_exit_with_the_code_of_a_regression() -> None:
    """`ebbench gate ... | head` must not end with the gate's 1."""
    read, write = os.pipe()
    os.close(read)
    code = "from ebbench.cli.main import run\nimport sys\nsys.argv = ['ebbench', 'policies', 'list']\nrun()"
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("error", [ValueError("a bug"), TypeError("a bug")])
def test_an_internal_error_prints_its_traceback_with_exit_code_4(
    cli: CliRunner, command: Callable[[BaseException], None], error: Exception
) -> None:
    command(error)
    done = cli.invoke(main.app, ["show"])
    assert done.exit_code == 4
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith(f"{type(error).__name__}: a bug\n")


@pytest.mark.parametrize("error", [ValueError("a bug"), RunError("no server"), OSError(28, "disk full"), MemoryError()])
def test_what_was_noted_on_an_error_ends_its_message(
    cli: CliRunner, command: Callable[[BaseException], None], error: Exception
) -> None:
    error.add_note("read it with: ebbench recover runs/x")
    command(error)
    assert cli.invoke(main.app, ["show"]).stderr.endswith("read it with: ebbench recover runs/x\n")


def test_a_crashed_process_exits_with_4() -> None:
    code = "import ebbench.cli.show as module\nmodule.show = lambda: 1 / 0\n" \
           "import sys\nsys.argv = ['ebbench', 'show']\nfrom ebbench.__main__ import run\nrun()"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize(
    ("encoding", "text", "line"),
    [
        ("utf-8", "p/bad\udcff/v1", "error: 'p/bad\\udcff/v1': not UTF-8; rename the file or directory\n"),
        ("ascii", "\u2013", "error: the output's encoding, ascii, has no '\\u2013'; set PYTHONIOENCODING=utf-8\n"),
    ],
)
def test_text_that_cannot_be_written_is_one_line(
    cli: CliRunner, command: Callable[[BaseException], None], encoding: str, text: str, line: str
) -> None:
    with pytest.raises(UnicodeEncodeError) as raised:
        text.encode(encoding)
    command(raised.value)
    done = cli.invoke(main.app, ["show"])
    assert (done.exit_code, done.stderr) == (4, line)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["shwo"], "Did you mean 'show'?"),
        (["show", "--frobnicate"], "--frobnicate"),
        (["show"], "Missing argument"),
        (["run", "sharegpt", "--num-prompts", "many"], "Invalid value for '--num-prompts'"),
    ],
)
def test_bad_usage_is_one_line_with_a_way_out(cli: CliRunner, args: list[str], text: str) -> None:
    done = cli.invoke(main.app, args)
    assert done.exit_code == 2
    assert text in done.stderr
    assert done.stderr.count("\n") == 1
    assert "--help`" in done.stderr


def test_no_command_shows_the_help(cli: CliRunner) -> None:
    done = cli.invoke(main.app, [])
    assert done.exit_code == 2
    assert "Usage" in done.output


@pytest.mark.parametrize("args", [["--help"], ["-h"], ["run", "-h"], ["show", "--help"], ["policies", "--help"]])
def test_every_command_shows_its_help(cli: CliRunner, args: list[str]) -> None:
    done = cli.invoke(main.app, args)
    assert done.exit_code == 0
    assert "Usage" in done.stdout


def test_help_lists_exactly_the_commands_that_are_there(cli: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = CommandEntry("Not there.", main.MEASURE)
    monkeypatch.setitem(main.COMMANDS, "not-there", absent)
    shown = cli.invoke(main.app, ["--help"], env={"COLUMNS": "120"}).stdout
    assert "Show stored runs again." in shown
    assert "not-there" not in shown
    assert "No such command 'not-there'" in cli.invoke(main.app, ["not-there"]).stderr


def test_every_command_of_the_table_that_is_there_loads() -> None:
    for name in main._Commands().list_commands(None):
        assert main.load_command(name).name == name


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom ebbench.cli.main import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'numpy', 'pyarrow', 'torch', 'vllm', 'msgspec', 'datasets', 'pandas', 'httpx'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_version_option_prints_the_version(cli: CliRunner) -> None:
    from ebbench import __version__

    assert cli.invoke(main.app, ["--version"]).stdout == f"ebbench {__version__}\n"


@pytest.mark.parametrize(
    ("given", "expanded"),
    [
        ([], []),
        (["a", "--goodput"], ["a", "--goodput"]),
        (["--goodput", "ttft:5"], ["--goodput", "ttft:5"]),
        (
            ["--goodput", "ttft:5", "tpot:1", "w"],
            ["--goodput", "ttft:5", "--goodput", "tpot:1", "w"],
        ),
        (
            ["--goodput", "ttft:5", "--goodput", "tpot:1", "e2el:9", "--json"],
            ["--goodput", "ttft:5", "--goodput", "tpot:1", "--goodput", "e2el:9", "--json"],
        ),
        (["--goodput", "ttft:5", "trace:500"], ["--goodput", "ttft:5", "trace:500"]),
        (["--goodput", "5", "sharegpt"], ["--goodput", "5", "sharegpt"]),
    ],
)
def test_goodput_takes_several_values(given: list[str], expanded: list[str]) -> None:
    assert expand_goodput(given) == expanded


def test_policies_list_shows_every_policy(cli: CliRunner) -> None:
    import json

    listed: list[dict[str, Any]] = json.loads(cli.invoke(main.app, ["policies", "list", "--json"]).stdout)
    assert [entry["name"] for entry in listed] == list(descriptions())
    for entry in listed:
        assert entry["name"] in cli.invoke(main.app, ["policies", "list"]).stdout
    shown = cli.invoke(main.app, ["policies", "show", "eb:theta=0.5"]).stdout
    assert "theta" in shown
    assert "0.5" in shown
    assert "initial_theta" not in shown, "heeded without a threshold of its own only"
    assert "initial_theta" in cli.invoke(main.app, ["policies", "show", "eb"]).stdout
    assert cli.invoke(main.app, ["policies", "show", "deferred"]).exit_code == 0
    wrong = cli.invoke(main.app, ["policies", "show", "eb+"])
    assert wrong.exit_code == 2
    assert "unknown policy" in wrong.stderr


def test_every_setting_of_a_policy_is_shown_with_its_range(cli: CliRunner) -> None:
    from vllm_eb.policy import settings_of

    for kind, made in policy_types().items():
        shown = cli.invoke(main.app, ["policies", "show", kind], env={"COLUMNS": "300"}).stdout
        for name, about in settings_of(made).items():
            assert name in shown
            assert about.values in shown
            assert about.help in shown


def test_help_fills_the_width_whatever_the_lines_of_the_docstring() -> None:
    for words in (("compare",), ("theory", "deferred")):
        done = CliRunner().invoke(main.app, [*words, "--help"], env={"COLUMNS": "300", "TERMINAL_WIDTH": "300"})
        head = done.output.partition("╭")[0].splitlines()
        paragraphs = [line for line in head if line.strip()]
        # Paragraphs are apart by an empty line each, so no two lines with text follow one another.
        assert len(paragraphs) > 1
        assert all(not (a.strip() and b.strip()) for a, b in itertools.pairwise(head))


def test_an_error_of_the_plugin_is_known_by_its_class(capsys: pytest.CaptureFixture[str]) -> None:
    from vllm_eb.settings import GivenValueError

    class OwnPolicyError(GivenValueError):
        """As a policy in a module of the user's may define it."""

    cases = ((OwnPolicyError("no such k"), 2, "error: no such k"), (ValueError("a bug"), 4, "Traceback"))
    for error, code, said in cases:

        def broken(raised: Exception = error) -> None:
            raise raised

        assert exit_code(broken) == code
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", ">&- 2>&- <&-"])
def test_a_command_runs_with_closed_streams(closed: str, tmp_path: Path) -> None:
    """Its output goes nowhere, and no file that it opens gets a stream's number."""
    code = (
        "import os, sys\n"
        "from ebbench.cli import main\n"
        "sys.argv = ['ebbench', 'policies', 'list', '--json']\n"
        "try:\n    main.run()\n"
        "finally:\n    open(sys.orig_argv[-1], 'w').write(repr([os.readlink(f'/proc/self/fd/{n}') for n in (1, 3)]))\n"
    )
    seen = tmp_path / "seen"
    done = subprocess.run(["sh", "-c", f'"$0" -c "$1" "$2" {closed}', sys.executable, code, str(seen)], check=False)
    assert (done.returncode, seen.read_text()) == (0, repr(["/dev/null", str(seen)]))


def test_an_error_on_a_terminal_is_broken_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "baseline and candidate are not comparable: device rtx-pro-6000 against l40s"
    assert wrapped(message) == message
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    assert wrapped(message).splitlines() == [
        "baseline and candidate are not",
        "comparable: device rtx-pro-6000 against",
        "l40s",
    ]


@pytest.mark.parametrize("command", ["runs", "workloads", "scenarios", "policies", "devices", "theory"])
def test_flags_of_a_command_with_commands_below_it_have_no_type(cli: CliRunner, command: str) -> None:
    shown = cli.invoke(main.app, [command, "--help"]).output
    assert "--help" in shown
    assert "<bool>" not in shown
