"""Kinds of events of the event loop, and their order at the same nanosecond.

Events at the same nanosecond are taken in the order of their priority, then in the order they were made:

     0  ARRIVAL   a session's first request reaches the front stage
     1  RESUME    a pause before a request has ended
     2  DELIVERY  a dispatched request reaches its unit
     3  ENTRY     the API server hands a request to its unit
     4  TRANSFER  the KV of a request has arrived at its decode unit
     5  DEPARTURE the last token of a request has left the API server
     6  PASS      a forward pass has ended: the engine signals
     7  SIGNAL    the signal reaches the dispatcher
     8  NOTICE    the dispatcher learns which requests have ended
     9  TIMER     the dispatcher asked to be polled
    10  WAKE      an engine's oldest step has ended, or an arrival wakes it
    11  HANG_UP   a client hangs up; tokens of this very moment still reach it

A signal comes before its engine wakes. Without network delay a dispatcher can therefore still hand a batch to the step
that is scheduled at this very moment; with a delay of ``network_ns`` each way it cannot.
"""

ARRIVAL, RESUME, DELIVERY, ENTRY, TRANSFER, DEPARTURE, PASS, SIGNAL, NOTICE, TIMER, WAKE, HANG_UP = range(12)
NEVER_NS = 1 << 62
FRONT, BACK = 0, 1  # stages: the one that clients reach, and the one for decodes alone
