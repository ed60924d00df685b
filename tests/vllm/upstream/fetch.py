"""vLLM's tests, out of its source distribution; nothing of them is kept in this repository.

pip fetches the source distribution from the index it is configured for. It asks vLLM's build for the package's
metadata on the way: that needs two build tools, which are installed beside it, and no compiler.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BUILD_TOOLS = ("setuptools>=77", "setuptools-rust>=1.9", "setuptools-scm>=8")
LONGEST_S = 900.0


class FetchError(Exception):
    """The source distribution cannot be fetched; the message is the reason."""


def fetch(version: str, folder: Path) -> Path:
    """The folder in which vLLM's package ``tests`` of that version lies; fetched once.

    Raises FetchError if pip cannot fetch it.
    """
    root = folder / version
    if not (root / "tests" / "__init__.py").exists():
        with _unfinished(root) as unfinished:
            _unpack(_download(version, unfinished), "tests/", unfinished)
            (unfinished / "tests" / "__init__.py").touch()
    return root


def fetch_python_code(version: str, folder: Path) -> Path:
    """A folder with the package ``vllm`` of that version, which Python imports if it stands first in its path.

    It has no compiled parts, and calls itself a build for CPUs. Fetched once. Raises FetchError as :func:`fetch` does.
    """
    root = folder / f"{version}-python"
    if not root.exists():
        with _unfinished(root) as unfinished:
            _unpack(_download(version, unfinished), "vllm/", unfinished)
            about = unfinished / f"vllm-{version}+cpu.dist-info"
            about.mkdir()
            (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    return root


@contextmanager
def _unfinished(root: Path) -> Iterator[Path]:
    """A folder that becomes ``root`` at the end, if nothing fails."""
    unfinished = root.with_name(f"{root.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    yield unfinished
    shutil.rmtree(root, ignore_errors=True)
    unfinished.rename(root)


def _download(version: str, folder: Path) -> Path:
    tools = folder / "build-tools"
    _pip("install", "--quiet", "--target", str(tools), *BUILD_TOOLS)
    environment = {"PYTHONPATH": str(tools), "VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": version}
    _pip(
        "download", "--no-deps", "--no-binary", "vllm", "--no-build-isolation", "-d", str(folder), f"vllm=={version}",
        **environment,
    )  # fmt: skip
    found = sorted(folder.glob("vllm-*.tar.gz"))
    if not found:
        raise FetchError(f"pip fetched no source distribution of vLLM {version}")
    return found[0]


def _pip(*words: str, **environment: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    try:
        done = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, timeout=LONGEST_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise FetchError(f"pip {words[0]} was not done after {LONGEST_S:g} s") from None
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise FetchError(f"pip {words[0]} failed: {''.join(last)}")


def _unpack(archive: Path, wanted: str, folder: Path) -> None:
    """One folder of the archive: a folder ``vllm`` beside ``tests`` would hide the installed one."""
    with tarfile.open(archive) as opened:
        members = []
        for member in opened.getmembers():
            _, _, inside = member.name.partition("/")
            if inside.startswith(wanted):
                member.name = inside
                members.append(member)
        if hasattr(tarfile, "data_filter"):
            opened.extractall(folder, members, filter="data")
        else:  # Python 3.11.2, Debian's, cannot refuse unsafe members yet
            opened.extractall(folder, members)
    archive.unlink()
    shutil.rmtree(folder / "build-tools", ignore_errors=True)
