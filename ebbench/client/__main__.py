"""``python -m ebbench.client CONTROL BELL [OTHER_BELL ...]``: a worker process.

The arguments are socket descriptors it inherits; everything else comes over the control socket. A process of our
own making, not multiprocessing's, so that the caller's main module is not imported again and nothing is pickled.
"""

import os
import socket
import sys

import uvloop

from ebbench.child import end_with_parent
from ebbench.client.process import work
from ebbench.client.worker import Lines

if __name__ == "__main__":
    end_with_parent()
    control, bell, *others = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    uvloop.run(work(Lines(control, bell, tuple(others)), os.environ))
