"""Dispatch of requests over several engines: policies as pure functions of events, shared by simulator and gateway.

A policy reads neither clock nor socket. It receives events with their times (integer ns of any monotonic clock) and
returns orders. :mod:`ebbench.dispatch.base` has the interface, :mod:`ebbench.dispatch.policies` the names.
"""

from ebbench.config.topology import DEFAULT_DISPATCH
from ebbench.dispatch.base import Dispatcher, DispatchRequest, EndForward, Fleet, Order, UnitReport, UnitState
from ebbench.dispatch.policies import DESCRIPTIONS, DispatchSpec, make_dispatcher, parse_dispatch

__all__ = [
    "DEFAULT_DISPATCH",
    "DESCRIPTIONS",
    "DispatchRequest",
    "DispatchSpec",
    "Dispatcher",
    "EndForward",
    "Fleet",
    "Order",
    "UnitReport",
    "UnitState",
    "make_dispatcher",
    "parse_dispatch",
]
