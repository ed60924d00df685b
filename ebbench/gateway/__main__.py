"""``python -m ebbench.gateway SETTINGS_JSON``: the child process of :class:`ebbench.gateway.process.GatewayProcess`."""

import gc
import sys

import msgspec

from ebbench.errors import EbbenchError
from ebbench.gateway.serve import serve
from ebbench.gateway.settings import GatewaySettings


def _announce(port: int) -> None:
    gc.collect()
    gc.freeze()  # what lives now lives on; the collector need not look at it while streaming
    print(f"READY {port}", flush=True)


if __name__ == "__main__":
    try:
        serve(msgspec.json.decode(sys.argv[1], type=GatewaySettings), _announce)
    except EbbenchError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
