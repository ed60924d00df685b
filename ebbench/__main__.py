"""The process: ``ebbench`` and ``python -m ebbench``.

Little else is imported here, so that Ctrl-C, SIGTERM and SIGHUP end in one line from the first moment on,
while the command line loads.
"""

from __future__ import annotations

import sys


def run() -> None:
    """Console entry of the distribution."""
    try:
        from ebbench.termination import handle_signals, held

        handle_signals()
        from ebbench.without_pandas import process_of_ebbench

        process_of_ebbench()
        with held():  # an import that is broken off may raise anything
            from ebbench.cli import main
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        sys.exit(130)
    main.run()


if __name__ == "__main__":
    run()
