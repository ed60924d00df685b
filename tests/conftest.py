"""Settings of all tests: Hypothesis deadlines and the order of the files."""

import pytest
from hypothesis import settings

# A machine may be slow: no property test fails for the time that one example takes.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

LONGEST = (
    "tests/vllm/test_signals_vllm.py",  # nine vLLM servers, one after the other
    "tests/docs/test_docs.py",
    "tests/sweep/test_ray_cluster.py",
    "tests/processes/test_signals.py",
    "tests/gate/test_github.py",
)
"""Files that take longest, the longest first. The tests of a file run in one process: begun last, they would keep one
process busy for minutes while the other is idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files; the order within a file and of the others stays."""
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(LONGEST)))
