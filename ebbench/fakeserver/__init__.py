"""Fake OpenAI-compatible server with known timing, switchable faults and an exact ledger."""

from ebbench.fakeserver.config import FakeConfig, Fault, parse_fault
from ebbench.fakeserver.process import FakeServerProcess
from ebbench.fakeserver.scheduled_response import LedgerEntry

__all__ = ["FakeConfig", "FakeServerProcess", "Fault", "LedgerEntry", "parse_fault"]
