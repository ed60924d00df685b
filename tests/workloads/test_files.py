import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbench.errors import InputFileError
from ebbench.workloads import files
from ebbench.workloads.files import read_file, read_json

VALUES = st.recursive(
    st.none() | st.integers(-(10**9), 10**9) | st.text(max_size=12) | st.floats(-1e6, 1e6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
RECORDS = st.lists(st.dictionaries(st.text(max_size=4), VALUES, max_size=4), max_size=8)


class Trickle(io.BytesIO):
    """Gives at most ``size`` bytes at a time, whatever is asked."""

    def __init__(self, content: bytes, size: int) -> None:
        super().__init__(content)
        self._size = size

    def read(self, _: int | None = -1) -> bytes:
        return super().read(self._size)


@settings(max_examples=150, deadline=None)
@given(RECORDS, st.sampled_from([None, 1, 3]), st.booleans(), st.integers(1, 7))
def test_an_array_reads_the_same_however_it_is_cut(
    records: list[dict[str, Any]], indent: int | None, ascii_only: bool, size: int
) -> None:
    content = json.dumps(records, indent=indent, ensure_ascii=ascii_only).encode(errors="surrogatepass")
    try:
        content.decode()
    except UnicodeDecodeError:
        return
    read = [record.value for record in read_json(Trickle(content, size), "x")]
    assert read == json.loads(content)


@settings(max_examples=150, deadline=None)
@given(RECORDS.filter(bool), st.integers(1, 7), st.sampled_from(["\n", "\r\n", "\n\n"]))
def test_lines_read_the_same_however_they_are_cut(records: list[dict[str, Any]], size: int, end: str) -> None:
    content = end.join(json.dumps(record) for record in records).encode()
    found = list(read_json(Trickle(content, size), "x"))
    assert [record.value for record in found] == records
    step = end.count("\n")
    assert [record.line for record in found] == [1 + step * i for i in range(len(records))]


def test_array_records_know_their_line() -> None:
    content = json.dumps([{"a": 1}, {"a": 2}], indent=1).encode()
    assert [(record.line, record.number) for record in read_json(io.BytesIO(content), "x")] == [(2, 1), (5, 2)]


def test_a_stream_is_read_only_as_far_as_needed() -> None:
    rows = [{"text": "word " * 400} for _ in range(5000)]
    for content in (json.dumps(rows).encode(), "\n".join(map(json.dumps, rows)).encode()):
        stream = io.BytesIO(content)
        records = read_json(stream, "x")
        for _ in range(10):
            next(records)
        assert stream.tell() <= 2 * files.CHUNK_BYTES < len(content)


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        (b"", None, "is empty"),
        (b" \n \n", None, "is empty"),
        (b'{"a": 1}\n{"a": }\n', 2, "is not valid JSON"),
        (b'{"a": 1}\n\n\n{"a"', 4, "is not valid JSON"),
        (b'{\n"a": 1}\n', 1, "must be an array"),
        (b'[{"a": 1},\n{"a": x}]', 2, "record 2 is not valid JSON"),
        (b'[{"a": 1}\n{"a": 2}]', 2, "expected ',' or ']' after record 1"),
        (b'[{"a": 1}', 1, "expected ',' or ']' after record 1"),
        (b'[{"a": 1},\n', 2, "record 2 is not valid JSON"),
        (b'{"a": 1}\n{"a": "\xff"}', 2, "not UTF-8 text"),
        (b"\xff\xfe\x00\x00", 1, "not UTF-8 text"),
    ],
)
def test_broken_files_name_the_line(tmp_path: Path, content: bytes, line: int | None, message: str) -> None:
    path = tmp_path / "data"
    path.write_bytes(content)
    with pytest.raises(InputFileError, match=message) as caught:
        list(read_file(path, ["a"]))
    assert caught.value.line == line
    assert "\n" not in str(caught.value)


def test_a_broken_array_is_given_up_after_a_bounded_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(files, "LINE_BYTES", 10_000)
    stream = io.BytesIO(b'[{"a": "' + b"x" * 10_000_000)
    with pytest.raises(InputFileError, match="a line or record of more than"):
        list(read_json(stream, "x"))
    assert stream.tell() < 20_000


def test_parquet_records_have_the_columns_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    rows = [{"a": i, "b": [{"c": str(i)}], "unused": "x"} for i in range(2000)]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=300)
    found = list(read_file(path, ["a", "b"]))
    assert [record.value for record in found] == [{"a": row["a"], "b": row["b"]} for row in rows]
    assert [record.number for record in found] == list(range(1, 2001))
    with pytest.raises(InputFileError, match="has no column 'z'; its columns are a, b, unused"):
        list(read_file(path, ["z"]))


def test_truncated_parquet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    path.write_bytes(b"PAR1 and then nothing of the kind")
    with pytest.raises(InputFileError, match=r"data.parquet: not a readable Parquet file"):
        list(read_file(path, ["a"]))


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="No such file"):
        list(read_file(tmp_path / "none", []))
    with pytest.raises(InputFileError, match="is a folder"):
        list(read_file(tmp_path, []))
