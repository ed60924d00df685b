"""``python -m ebbench.client CONTROL WAKE_UP [OTHER_WAKE_UP ...]``: a worker of a program that imports ebbench.

A command's worker is a copy of the command (:class:`ebbench.process.child.ForkedChild`).
The arguments are descriptors of inherited sockets; the assignment comes over the control socket. The process is started
without multiprocessing: the main module of the calling program is not imported a second time and nothing is pickled.
"""

import os
import signal
import socket
import sys

from ebbench.client.worker import WorkerSockets, worker_process
from ebbench.process.child import end_with_parent

if __name__ == "__main__":
    end_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(
            number, signal.SIG_IGN
        )  # a terminal signals the whole process group; the parent decides what the workers do
    control, wake_up, *others = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    worker_process(WorkerSockets(control, wake_up, tuple(others)), os.environ)
