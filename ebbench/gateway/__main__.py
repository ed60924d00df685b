"""``python -m ebbench.gateway SETTINGS_JSON``: the child process of :class:`ebbench.gateway.process.GatewayProcess`."""

import sys

import msgspec

from ebbench.errors import EbbenchError
from ebbench.gateway.serve import serve
from ebbench.gateway.settings import GatewaySettings
from ebbench.process.child import announce, end_with_parent

if __name__ == "__main__":
    end_with_parent()
    try:
        serve(msgspec.json.decode(sys.argv[1], type=GatewaySettings), announce)
    except EbbenchError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
