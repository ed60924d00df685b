"""A server is stopped only after its record files have stopped growing."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from ebbench.engines.vllm import await_records


def test_the_engine_waits_for_a_record_that_still_grows(tmp_path: Path) -> None:
    shard = tmp_path / "000000.msgpack"
    shard.write_bytes(b"head")

    def grow() -> None:
        for _ in range(8):
            time.sleep(0.25)
            with shard.open("ab") as file:
                file.write(b"step")

    writer = threading.Thread(target=grow)
    writer.start()
    await_records([tmp_path, None])
    assert not writer.is_alive()
    assert shard.stat().st_size == 4 + 8 * 4


def test_the_engine_stops_waiting_for_a_record_at_the_time_limit(tmp_path: Path) -> None:
    shard = tmp_path / "000000.msgpack"
    shard.write_bytes(b"")
    ended = threading.Event()

    def grow() -> None:
        while not ended.wait(0.05):
            with shard.open("ab") as file:
                file.write(b"step")

    writer = threading.Thread(target=grow)
    writer.start()
    try:
        await_records([tmp_path], longest_s=0.5)
        assert writer.is_alive()
    finally:
        ended.set()
        writer.join()
