"""ebbench: which batching discipline, on my GPU, for my traffic, and does this commit slow it down?

``import ebbench as eb`` costs nothing: its functions and classes (docs/python.md) are imported when they are used.
Their types are in ``__init__.pyi``.
"""

__version__ = "0.1.0"

__all__ = [
    "CapacityResult", "Comparison", "DataError", "EbbenchError", "InputFileError", "PlanResult", "ProgressEvent",
    "RunError", "RunResult", "Runs", "UnknownNameError", "UsageError", "capacity", "capacity_async", "compare", "load",
    "plan", "plan_async", "run", "run_async",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("ebbench.api"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
