"""Fake OpenAI-compatible server with known timing, switchable faults and an exact ledger."""

from ebbench.fakeserver.config import FakeConfig, Fault, parse_fault
from ebbench.fakeserver.ledger import LedgerEntry
from ebbench.fakeserver.process import FakeServerProcess

__all__ = ["FakeConfig", "FakeServerProcess", "Fault", "LedgerEntry", "parse_fault"]
