"""``python -m ebbench.fakeserver CONFIG_JSON``: the child process of :class:`FakeServerProcess`."""

import gc
import sys

import msgspec

from ebbench.fakeserver.config import FakeConfig
from ebbench.fakeserver.server import run


def _announce(port: int) -> None:
    # Everything alive now stays alive: the collector need not look at it again and again while streaming.
    gc.freeze()
    print(f"READY {port}", flush=True)


if __name__ == "__main__":
    run(msgspec.json.decode(sys.argv[1], type=FakeConfig), _announce)
