"""A child that is a copy of its parent: what it keeps of it, and that it ends with it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from ebbench.process.child import may_fork

PARENT = """
import json, os, signal, socket, sys, time
from pathlib import Path
from ebbench.process.child import ForkedChild, may_fork
from ebbench.process.interpreter import process_of_ebbench
from ebbench.process.termination import SIGNALS

process_of_ebbench()
assert may_fork()
ours, theirs = socket.socketpair()
secret = open(sys.argv[1])

def target(path):
    try:
        return os.readlink(path)
    except FileNotFoundError:  # of the listing itself
        return None

def work():
    state = {
        "of_parent": [path.name for path in Path("/proc/self/fd").iterdir() if target(path) == sys.argv[1]],
        "group": os.getpgid(0) == os.getpid(),
        "ignored": all(signal.getsignal(number) is signal.SIG_IGN for number in SIGNALS),
        "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "modules": "ebbench.process.child" in sys.modules,
    }
    theirs.sendall(json.dumps(state).encode())
    time.sleep(60)

child = ForkedChild(work, [theirs.fileno()])
theirs.close()  # where the child fails, recv() ends
state = json.loads(ours.recv(4096)) | {"pid": child.pid}
print(json.dumps(state), flush=True)
if sys.argv[2] == "kill":
    child.kill()
    child.wait(10)
    print("ended", flush=True)
time.sleep(60)
"""


def started(tmp_path: Path, ending: str) -> tuple[subprocess.Popen[str], dict[str, object]]:
    secret = tmp_path / "secret"
    secret.write_text("of the parent")
    command = [sys.executable, "-c", PARENT, str(secret), ending]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    return parent, json.loads(parent.stdout.readline())


def test_a_copy_keeps_the_modules_and_its_descriptors_only(tmp_path: Path) -> None:
    parent, state = started(tmp_path, "kill")
    try:
        pid = state.pop("pid")
        assert state == {"of_parent": [], "group": True, "ignored": True, "blocked": 0, "modules": True}
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ended\n"
        assert isinstance(pid, int)
        assert not Path(f"/proc/{pid}").exists()
    finally:
        parent.kill()
        parent.communicate()


def test_a_copy_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent, state = started(tmp_path, "wait")
    assert isinstance(state["pid"], int)
    watched = os.pidfd_open(state["pid"])
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    ended, _, _ = select.select([watched], [], [], 20)
    os.close(watched)
    assert ended


def test_a_program_that_imports_ebbench_is_not_copied() -> None:
    assert not may_fork()
