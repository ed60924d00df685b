"""Load generator: sends the requests of a plan to an OpenAI-compatible server and measures the responses."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbench.client.load_generator import DriveResult, drive
    from ebbench.spec.client import ClientOptions

__all__ = ["ClientOptions", "DriveResult", "drive"]


def __getattr__(name: str) -> Any:
    """What the parent process needs, imported when asked for: workers start from this package too, without it."""
    if name in __all__:
        from ebbench.client import load_generator

        return getattr(load_generator, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
