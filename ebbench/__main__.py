"""The process: ``ebbench`` and ``python -m ebbench``.

Little else is imported here, so that Ctrl-C, SIGTERM and SIGHUP end in one line from the first moment on,
while the command line loads.
"""

from __future__ import annotations

import gc
import os
import resource

TYPE_CHECKING = False  # not from typing, which a small limit of memory does not let in
if TYPE_CHECKING:
    from typing import NoReturn

LEAST_ADDRESS_SPACE_MIB = 768
"""With less, importing numpy can loop endlessly: OpenBLAS asks for memory until it gets some."""

COLLECTIONS = (200_000, 20, 100)
"""Thresholds of the garbage collector: a command loads about 120,000 objects, which a collection searches in vain."""


def run() -> None:
    """Console entry of the distribution."""
    gc.set_threshold(*COLLECTIONS)
    try:
        _refuse_small_limit()
        from ebbench.process.termination import handle_signals, held

        handle_signals()
        from ebbench.process.interpreter import process_of_ebbench

        process_of_ebbench()
        with held():  # an import that is broken off may raise anything
            from ebbench.cli import main
    except KeyboardInterrupt:
        _end("interrupted", 130)
    except MemoryError:
        _end("not enough memory to start", 4)
    except (ImportError, OSError, SystemError) as error:
        _end(f"cannot start: {error}", 4)
    main.run()


def _refuse_small_limit() -> None:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < LEAST_ADDRESS_SPACE_MIB << 20:
        _end(f"not enough memory: ulimit -v allows {limit >> 20} MiB, ebbench takes 2,048 MiB or more", 4)


def _end(message: str, code: int) -> NoReturn:
    """Exit without cleanup: nothing has been done yet, and half-imported modules could fail in it.

    Python's own exit code for an error would be 1, which is the gate's for a regression.
    """
    os.write(2, f"error: {message}\n".encode())
    os._exit(code)


if __name__ == "__main__":
    run()
