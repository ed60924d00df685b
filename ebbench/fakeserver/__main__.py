"""``python -m ebbench.fakeserver CONFIG_JSON``: the child of ``fakeserver.process``."""

import sys

import msgspec

from ebbench.fakeserver.config import FakeConfig
from ebbench.fakeserver.server import run
from ebbench.process.child import announce, end_with_parent

if __name__ == "__main__":
    end_with_parent()
    run(msgspec.json.decode(sys.argv[1], type=FakeConfig), announce)
