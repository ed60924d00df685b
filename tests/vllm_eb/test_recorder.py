"""The record directory: a round trip of records, also after a kill and over several shards."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from vllm_eb import reports
from vllm_eb.reports import Recorder, StepRecord, folder_of_rank, read_frames
from vllm_eb.strategy import Record


def step(number: int, scheduled: dict[str, int], prefill_tokens: int = 0) -> StepRecord:
    return StepRecord(
        step_id=number, scheduled_ns=10 * number, mode="eb", prefill_tokens=prefill_tokens, decode_seqs=len(scheduled),
        scheduled=scheduled, kv_blocks_used=3, waiting=1, running=2, preempted={"x"}, k=4, n_limit=8,
        start_ns=10 * number + 1, end_ns=10 * number + 9,
    )  # fmt: skip


def frames(folder: Path) -> list[list[object]]:
    return [frame for shard in sorted(folder.glob("*.msgpack")) for frame in read_frames(shard)]


def test_steps_and_decisions_come_out_as_they_went_in(tmp_path: Path) -> None:
    writer = Recorder(tmp_path / "a" / "b", {"policy": "eb", "kv_blocks_total": 9})
    writer.step(step(0, {"p": 5, "q": 7}, prefill_tokens=12))
    writer.step(step(1, {"q": 1, "p": 1, "r": 1}))
    writer.decisions([Record(1.5, 1, "phase", "because", "eb", "prefill", {"idle": 3, "theta": None})])
    writer.decisions([])
    writer.close()
    head, *rest = frames(tmp_path / "a" / "b")
    assert head[0] == "head"
    assert head[1]["policy"] == "eb"  # type: ignore[index]
    assert rest == [
        ["ids", ["p", "q"]],
        ["step", 0, 0, 1, 9, "eb", 12, 2, [0, 1], [5, 7], 3, 1, 2, ["x"], 4, 8],
        ["ids", ["r"]],
        ["step", 1, 10, 11, 19, "eb", 0, 3, [1, 0, 2], None, 3, 1, 2, ["x"], 4, 8],
        ["decision", 1_500_000_000, 1, "phase", "because", "eb", "prefill", {"idle": 3, "theta": None}],
    ]


def test_every_shard_is_readable_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "SHARD_STEPS", 2)
    writer = Recorder(tmp_path, {"policy": "eb"})
    for number in range(5):
        writer.step(step(number, {"p": 1}))
    writer.close()
    shards = [read_frames(path) for path in sorted(tmp_path.glob("*.msgpack"))]
    assert [[frame[0] for frame in shard] for shard in shards] == [
        ["head", "ids", "step", "step"],
        ["head", "ids", "step", "step"],
        ["head", "ids", "step"],
    ]


def test_a_second_recorder_does_not_overwrite_the_first(tmp_path: Path) -> None:
    for number in range(2):
        writer = Recorder(tmp_path, {"policy": "eb"})
        writer.step(step(number, {"p": 1}))
        writer.close()
    assert [frame[1] for frame in frames(tmp_path) if frame[0] == "step"] == [0, 1]


def test_after_a_kill_the_whole_frames_are_there(tmp_path: Path) -> None:
    writer = Recorder(tmp_path, {"policy": "eb"})
    for number in range(3):
        writer.step(step(number, {"p": 1}))
    writer.close()
    (shard,) = tmp_path.glob("*.msgpack")
    whole = shard.read_bytes()
    expected = read_frames(shard)
    for cut in range(1, 60):
        shard.write_bytes(whole[:-cut])
        found = read_frames(shard)
        assert found == expected[: len(found)]
        assert len(found) >= len(expected) - 2


@pytest.mark.parametrize("content", [b"", b"PAR1 something else entirely", b"\x05\x00\x00\x00hello"])
def test_a_foreign_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "000000.msgpack"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"000000\.msgpack is not a vllm_eb record"):
        read_frames(path)


def test_a_full_disk_ends_the_record_not_the_engine(tmp_path: Path) -> None:
    writer = Recorder(tmp_path, {"policy": "eb"})

    class Full:
        def write(self, _data: bytes) -> int:
            raise OSError(28, "No space left on device")

        def flush(self) -> None: ...

        def close(self) -> None: ...

    writer._file = Full()  # type: ignore[assignment]
    writer.step(step(0, {"p": 1}))
    writer.close()
    writer.step(step(1, {"p": 1}))
    assert writer.failure is not None


def test_ranks_that_share_their_settings_record_apart(tmp_path: Path) -> None:
    writers = [Recorder(folder_of_rank(tmp_path, rank), {"rank": rank}) for rank in range(3)]
    for rank, writer in enumerate(writers):
        writer.step(step(rank, {"p": 1}))
        writer.close()
    heads = [frames(folder_of_rank(tmp_path, rank))[0] for rank in range(3)]
    assert [head[1]["rank"] for head in heads] == [0, 1, 2]  # type: ignore[index]
    assert folder_of_rank(tmp_path, 0) == tmp_path


def test_a_record_that_ends_early_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = Recorder(tmp_path, {})
    (tmp_path / "000001.msgpack").write_bytes(b"of somebody else")
    for number in range(reports.SHARD_STEPS + 1):
        writer.step(step(number, {"p": 1}))
    writer.close()
    assert writer.failure is not None
    assert "the record in" in caplog.text


def test_steps_are_dropped_and_counted_while_the_disk_is_too_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reports, "MAX_QUEUED", 10)
    hold, write = threading.Event(), Recorder._write_item

    def slow(self: Recorder, item: object) -> None:
        hold.wait()
        write(self, item)  # type: ignore[arg-type]

    monkeypatch.setattr(Recorder, "_write_item", slow)
    writer = Recorder(tmp_path, {"policy": "eb"})
    for number in range(100):
        writer.step(step(number, {"p": 1}))
    assert writer.dropped >= 89  # one is being written
    hold.set()
    writer.close()
    steps = [frame for frame in frames(tmp_path) if frame[0] == "step"]
    assert len(steps) == 100 - writer.dropped
    assert sum("too slow" in record.message for record in caplog.records) == 1
