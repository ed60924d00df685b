"""Kinds of events of the event loop, and their order at the same nanosecond.

Events at the same nanosecond are taken in the order of their priority, then in the order they were made:

     0  ARRIVAL   a session's first request reaches the front stage
     1  RESUME    a pause before a request has ended
     2  FOLLOW    the requests that ends have released are sent
     3  DELIVERY  a dispatched request reaches its unit
     4  ENTRY     the API server hands a request to its unit
     5  TRANSFER  the KV of a request has arrived at its decode unit
     6  DEPARTURE the last token of a request has left the API server
     7  PASS      a forward pass has ended: the engine signals
     8  SIGNAL    the signal reaches the dispatcher
     9  NOTICE    the dispatcher learns which requests have ended
    10  TIMER     the dispatcher asked to be polled
    11  WAKE      an engine's oldest step has ended, or an arrival wakes it
    12  HANG_UP   a client hangs up; tokens of this very moment still reach it

A signal comes before its engine wakes. Without network delay a dispatcher can therefore still hand a batch to the step
that is scheduled at this very moment; with a delay of ``network_ns`` each way it cannot.
"""

ARRIVAL, RESUME, FOLLOW, DELIVERY, ENTRY, TRANSFER, DEPARTURE, PASS, SIGNAL, NOTICE, TIMER, WAKE, HANG_UP = range(13)
NEVER_NS = 1 << 62
TURNAROUND_NS = 1
"""Time from the end of a request until the requests that it releases are sent, unless they pause.

A server begins its next step as soon as one has ended, so a request that answers a last token is too late for that
step, however fast the client is. One nanosecond says this and no more; the API server's time comes on top.
"""
FRONT, BACK = 0, 1  # stages: the one that clients reach, and the one for decodes alone
