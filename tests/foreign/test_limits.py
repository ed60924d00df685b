"""Files that would keep a reader busy or take its memory are refused in one line, at every reader of such files."""

from __future__ import annotations

import gzip
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbench.devices.loader import load_device
from ebbench.devices.model_config import read_config
from ebbench.devices.profiles import read_profile
from ebbench.engines.sim import SimEngine
from ebbench.errors import DataError, EbbenchError, InputFileError
from ebbench.foreign import documents
from ebbench.foreign.documents import load_toml
from ebbench.hazard import read_lengths
from ebbench.records.manifest import decode_manifest
from ebbench.records.run import Run
from ebbench.spec.server import EngineOptions
from ebbench.workloads import build_plan
from ebbench.workloads.files import read_file
from ebbench.workloads.spec import WorkloadSpec
from ebbench.workloads.trace import read_trace
from vllm_eb.policy import parse_policy

Read = Callable[[Path], object]


def a_workload(path: Path) -> object:
    return load_toml(path, WorkloadSpec)


def a_data_set(path: Path) -> object:
    return list(read_file(path, ()))


def a_manifest(path: Path) -> object:
    return decode_manifest(path.read_bytes(), path)


READERS: tuple[Read, ...] = (read_trace, a_data_set, a_workload, read_profile, read_config)


@pytest.mark.parametrize("read", READERS)
def test_a_pipe_a_device_and_a_folder_are_refused_at_once(tmp_path: Path, read: Read) -> None:
    pipe, folder = tmp_path / "pipe.toml", tmp_path / "folder.toml"
    os.mkfifo(pipe)
    folder.mkdir()
    for path, what in ((pipe, "is a pipe"), (Path("/dev/zero"), "is a device"), (folder, "is a folder")):
        with pytest.raises(InputFileError, match=what):
            read(path)


@pytest.mark.parametrize("read", [a_workload, read_profile, read_config, read_lengths])
def test_a_file_of_settings_is_read_up_to_a_size(tmp_path: Path, read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "SETTINGS_BYTES", 0)
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # takes no room on the disk
    with pytest.raises(InputFileError, match="is larger than"):
        read(path)


DEEP = 50_000


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (read_trace, '{"timestamp": 1, "input_length": 2, "output_length": 3, "more": %s}'),
        (read_trace, '[{"timestamp": 1, "input_length": 2, "output_length": 3, "more": %s}]'),
        (read_trace, '{"requests":\n%s}'),
        (read_trace, "requests:\n  %s"),
        (a_data_set, '{"a": %s}\n'),
        (a_data_set, '[{"a": %s}]\n'),
        (read_config, '{"model_type": "qwen3", "more": %s}'),
        (a_workload, 'name = "x"\nmore = %s'),
        (read_profile, "format = 1\nmore = %s"),
        (a_manifest, '{"schema_version": 1, "facts": %s}'),
    ],
)
@pytest.mark.parametrize("depth", [200, DEEP])
def test_values_that_are_nested_too_deeply_are_refused(tmp_path: Path, read: Read, text: str, depth: int) -> None:
    path = tmp_path / "deep"
    path.write_text(text % ("[" * depth + "1" + "]" * depth))
    with pytest.raises(EbbenchError, match=r"within each other|maximum nesting") as caught:
        read(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (read_trace, '{"timestamp": %s, "input_length": 2, "output_length": 3}'),
        (read_trace, '[{"timestamp": %s}]'),
        (read_trace, "timestamp: %s"),
        (a_data_set, '[{"a": %s}]\n'),
        (read_config, '{"hidden_size": %s}'),
        (a_workload, "num_prompts = %s"),
        (a_manifest, '{"schema_version": %s}'),
    ],
)
def test_a_number_of_thousands_of_digits_is_refused(tmp_path: Path, read: Read, text: str) -> None:
    path = tmp_path / "long"
    path.write_text(text % ("7" * 5000))
    with pytest.raises(EbbenchError, match=r"valid|manifest") as caught:
        read(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("read", READERS)
def test_bytes_that_are_no_text_are_named_with_their_line(tmp_path: Path, read: Read) -> None:
    path = tmp_path / "latin"
    text = '{"a":\n "\xe9"}'  # for a data set in an array: its lines are read one by one
    path.write_bytes((f"[{text}]" if read is a_data_set else text).encode("latin1"))
    with pytest.raises(InputFileError, match=r"UTF-8") as caught:
        read(path)
    assert caught.value.line == 2


ROW = b'{"timestamp": 1, "input_length": 2, "output_length": 3}\n'


HEADER = b"timestamp,input_tokens,output_tokens\n"


@pytest.mark.parametrize(
    ("start", "letter", "times", "problem"),
    [
        (ROW, b"\0", 80 << 20, "a line of more than 64 MiB"),
        (ROW, b"\n", 1 << 21, "more than 1,000,000 empty lines"),
        (HEADER, b"\n", 1 << 21, "more than 1,000,000 empty lines"),
        (HEADER, b"1", 20 << 20, "a line of more than"),
        (ROW + b" " * 1000 + b'{"a":', b"1", 100 << 20, "a line of more than 64 MiB"),
    ],
)
@pytest.mark.parametrize("packed", [True, False])
def test_lines_without_end_are_given_up(
    tmp_path: Path, start: bytes, letter: bytes, times: int, problem: str, packed: bool
) -> None:
    path, content = tmp_path / "log", start + letter * times
    path.write_bytes(gzip.compress(content, 1) if packed else content)
    with pytest.raises(InputFileError, match=problem):
        read_trace(path)


def test_what_unpacks_to_far_more_than_it_is_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_UNCHECKED_BYTES", 1 << 20)
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(ROW * 200_000))
    assert len(path.read_bytes()) < 200_000
    monkeypatch.setattr(documents, "UNPACKED_RATIO", 20)
    with pytest.raises(InputFileError, match=r"unpacks to more than 20 times its size.*gunzip"):
        read_trace(path)


@pytest.mark.parametrize("cut", ["middle", "end", "flipped"])
def test_a_damaged_gzip_file_is_named(tmp_path: Path, cut: str) -> None:
    packed = bytearray(gzip.compress(b"".join(b'{"a": %d}\n' % (i * 7919 % 1009) for i in range(5000))))
    if cut == "flipped":
        packed[len(packed) // 2] ^= 0xFF
    path = tmp_path / "log.jsonl.gz"
    path.write_bytes(packed[: {"middle": len(packed) // 2, "end": -3}.get(cut)])
    with pytest.raises(InputFileError, match=r"log.jsonl.gz.*cannot be unpacked|is not valid JSON"):
        read_trace(path)


def test_a_table_has_a_bounded_number_of_columns(tmp_path: Path) -> None:
    path = tmp_path / "wide.csv"
    path.write_text(",".join(f"c{i}" for i in range(1_000_000)) + "\n" + "1," * 999_999 + "1\n")
    with pytest.raises(InputFileError, match="more than 2,000 columns"):
        read_trace(path)
    wide = tmp_path / "wide.parquet"
    pq.write_table(pa.table({f"c{i}": [1] for i in range(3000)}), wide)
    with pytest.raises(InputFileError, match="has 3,000 columns"):
        read_trace(wide)


def test_an_object_has_a_bounded_number_of_columns(tmp_path: Path) -> None:
    path = tmp_path / "wide.jsonl"
    path.write_text(json.dumps({f"c{i}": i for i in range(100_000)}) + "\n")
    with pytest.raises(InputFileError, match="columns"):
        read_trace(path)


def test_parquet_rows_are_counted_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "long.parquet"
    pq.write_table(pa.table({"timestamp": [1.0] * 2000, "input_tokens": [1] * 2000, "output_tokens": [1] * 2000}), path)
    monkeypatch.setattr(documents, "ROWS", 1000)
    with pytest.raises(InputFileError, match="has 2,000 rows, and at most 1,000 are read"):
        read_trace(path)


def test_a_cell_may_be_as_long_as_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    path.write_text(f'time,prompt,output_tokens\n1.5,"{"word " * 100_000}",3\n2.5,x,3\n')
    assert read_trace(path).requests.input_tokens.tolist() == [125_000, 1]


@pytest.mark.parametrize(
    "line",
    ["=" * 200_000, "a" * 200_000, "a.b-" * 50_000, "[ " * 100_000, '" ' * 99_999, '"A ' * 60_000, "a=" * 100_000],
)
def test_access_logs_are_read_in_time_linear_in_a_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "access.log"
    good = '1.2.3.4 - - [10/Oct/2026:13:55:3%d +0000] "POST /v1 HTTP/1.1" 200 prompt_tokens=9 completion_tokens=7 '
    path.write_text("".join(good % i + line + "\n" for i in range(5)))
    # Twice the square of a line takes minutes, five lines take less than a second.
    code = f"from pathlib import Path; from ebbench.workloads.trace import read_trace; read_trace(Path({str(path)!r}))"
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or "InputFileError" in done.stderr, done.stderr[-500:]


def test_yaml_that_names_one_list_a_billion_times_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "laughs.yaml"
    lines = ["a0: &a0", "- 1", "- 1", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 20)}]" for i in range(1, 9))]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(InputFileError, match="in all"):
        read_trace(path)


def _limited(mebibytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (mebibytes << 20, mebibytes << 20))


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"\0", b"\n", b"[", b'{"a":1}\n'])
def test_four_gigabytes_in_a_gzip_file_take_little_memory(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bomb.jsonl.gz"
    block = gzip.compress(content * ((64 << 20) // len(content)), 1)
    path.write_bytes(block * 64)  # gzip files may be put together
    command = [sys.executable, "-m", "ebbench", "workloads", "show", f"log:{path}"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, preexec_fn=lambda: _limited(2048)
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"error: {path}")


@pytest.mark.parametrize("change", ["empty", "twice"])
def test_a_stored_column_without_values_or_twice_is_named(tmp_path: Path, change: str) -> None:
    plan = build_plan("balanced", num_prompts=5, max_concurrency=2)
    device = load_device("rtx-pro-6000", "qwen3-8b", max_num_seqs=8, max_num_batched_tokens=512)
    result = SimEngine().run(
        plan, parse_policy("v1"), device, EngineOptions(max_num_seqs=8, max_num_batched_tokens=512)
    )
    requests = result.requests
    place, column = requests.column_names.index("status"), requests["status"]
    if change == "empty":
        requests = requests.set_column(place, "status", pa.nulls(len(requests), pa.string()))
    else:
        requests = requests.append_column("status", column)
    path = tmp_path / "requests.parquet"
    pq.write_table(requests, path)
    run = Run(tmp_path, None)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"requests.parquet: .*column.* (named 'status'|status has rows without)"):
        _ = run.requests


def test_a_stored_run_names_a_manifest_that_is_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "manifest.json")
    with pytest.raises(DataError, match="is a pipe"):
        Run.load(tmp_path)
