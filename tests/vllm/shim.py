"""A Python command of a shell script as a fork of a template: ``python -I -S shim.py NAME WORDS``; see template.py."""

import json
import os
import signal
import socket
import sys

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(name: str, *words: str) -> None:
    """Start the command with the streams of this process, pass signals on to it, and end as it ends."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect("\0" + name)
    message = {"words": [sys.executable, *words], "environment": dict(os.environ), "folder": os.getcwd()}  # noqa: PTH109  for a quick start
    socket.send_fds(connection, [json.dumps(message).encode()], [0, 1, 2])
    pid = int(connection.recv(100))
    for number in SIGNALS:
        signal.signal(number, lambda number, _frame: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    status = int(connection.recv(100))
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
