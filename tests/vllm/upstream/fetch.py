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
        unfinished = folder / f"{version}.part"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        _unpack(_download(version, unfinished), unfinished)
        (unfinished / "tests" / "__init__.py").touch()
        shutil.rmtree(root, ignore_errors=True)
        unfinished.rename(root)
    return root


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


def _unpack(archive: Path, folder: Path) -> None:
    """The archive's ``tests``, without the rest: a folder ``vllm`` beside them would hide the installed one."""
    with tarfile.open(archive) as opened:
        members = []
        for member in opened.getmembers():
            _, _, inside = member.name.partition("/")
            if inside.startswith("tests/"):
                member.name = inside
                members.append(member)
        opened.extractall(folder, members, filter="data")
    archive.unlink()
    shutil.rmtree(folder / "build-tools", ignore_errors=True)
