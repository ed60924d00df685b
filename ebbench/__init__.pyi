"""What ``import ebbench`` offers, for type checkers: at run time each name is imported when it is used."""

from ebbench.api import *  # noqa: F403

__version__: str
