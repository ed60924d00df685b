"""A policy outside the package, as a user would write it: one module, given by its dotted name."""

from __future__ import annotations

from pathlib import Path

TEXT = '''"""Refills every so many steps, whatever is idle."""

from dataclasses import dataclass

from vllm_eb.policy import PolicySpec, setting
from vllm_eb.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class BySteps(PolicySpec):
    description = "refills in every Nth step"

    steps: int = setting(help="steps between two refills", unit="steps", at_least=1, example=4)

    def strategy(self, engine, lengths):
        return Counting(engine, lengths, self.steps)


class Counting(Strategy):
    def __init__(self, engine, lengths, steps):
        super().__init__(engine, lengths)
        self._steps = steps

    def refill_due(self, view, refill, idle):
        return view.step_id % self._steps == 0


POLICY = BySteps
'''
NAME = "house_rules.by_steps"


def write(folder: Path) -> Path:
    """Write the package ``house_rules`` into ``folder``, to be put on the import path."""
    package = folder / "house_rules"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "by_steps.py").write_text(TEXT, encoding="utf-8")
    return folder
