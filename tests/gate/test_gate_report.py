"""The committed report of the gate's self-test, its part on pairs measured until the answer is known."""

from __future__ import annotations

import re
from pathlib import Path

from ebbench.gate.self_test import NOISES

REPORT = Path(__file__).resolve().parents[2] / "reports" / "gate.md"


def test_the_sequential_rule_fails_at_most_one_in_twenty_equal_sides() -> None:
    text = REPORT.read_text(encoding="utf-8")
    sequential = text.split("## Pairs until the answer is known")[1].split("Highest share")[0]
    alarms = re.findall(r"\| (\d+) \| ([\d.]+)% \(", sequential)
    assert len(alarms) == len(NOISES)
    assert all(int(trials) >= 250 and float(share) <= 5.0 for trials, share in alarms)
