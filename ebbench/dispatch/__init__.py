"""Dispatch over several engines: pure policies that the simulator and the gateway share.

A policy never reads a clock or a socket. It receives events with their times (integer nanoseconds of any monotonic
clock) and returns orders. See :mod:`ebbench.dispatch.base` for the interface and :mod:`ebbench.dispatch.spec` for
the names.
"""

from ebbench.dispatch.base import Dispatcher, DispatchRequest, EndForward, Order, UnitReport
from ebbench.dispatch.fleet import Fleet, Unit
from ebbench.dispatch.spec import DispatchSpec, dispatch_descriptions, make_dispatcher, parse_dispatch

__all__ = [
    "DispatchRequest",
    "DispatchSpec",
    "Dispatcher",
    "EndForward",
    "Fleet",
    "Order",
    "Unit",
    "UnitReport",
    "dispatch_descriptions",
    "make_dispatcher",
    "parse_dispatch",
]
