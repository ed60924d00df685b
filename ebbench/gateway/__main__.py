"""``python -m ebbench.gateway SETTINGS_JSON``: the child process of :class:`ebbench.gateway.process.GatewayProcess`."""

import sys

import msgspec

from ebbench.errors import EbbenchError
from ebbench.gateway.serve import serve
from ebbench.gateway.settings import GatewaySettings
from ebbench.process.child import end_with_parent
from ebbench.process.interpreter import no_full_collections


def _announce(port: int) -> None:
    no_full_collections()
    print(f"READY {port}", flush=True)


if __name__ == "__main__":
    end_with_parent()
    try:
        serve(msgspec.json.decode(sys.argv[1], type=GatewaySettings), _announce)
    except EbbenchError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
