"""The ``hub`` source: first records of a data set on the Hugging Face hub, streamed through ``datasets``.

Selected records are cached on disk (only the fields read, in the data set's own schema), so that the next plan of the
same workload needs no network.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ebbench.errors import UsageError
from ebbench.workloads.files import FileRecord, read_json
from ebbench.workloads.spec import Hub

PROBE_S = 3.0
_DEFAULT_ENDPOINT = "https://huggingface.co"
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def endpoint(environ: Mapping[str, str]) -> str:
    """The hub's address (``HF_ENDPOINT``)."""
    return (environ.get("HF_ENDPOINT") or _DEFAULT_ENDPOINT).rstrip("/")


def why_unreachable(hub: Hub, environ: Mapping[str, str] = os.environ, deadline_s: float = PROBE_S) -> str | None:
    """Why the hub does not serve the data set, or None if it does; decided within ``deadline_s`` seconds."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        if environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            return f"{name} is set"
    import httpx  # noqa: F401 - before the deadline begins: it may take a second

    address = endpoint(environ)
    answer: list[str | None] = []
    # In a thread, since no client limits resolving, connecting and reading by one deadline.
    asker = threading.Thread(target=lambda: answer.append(_ask(address, hub, deadline_s)), daemon=True)
    asker.start()
    asker.join(deadline_s)
    return answer[0] if answer else f"no response from {address} within {deadline_s:g} s"


def _ask(address: str, hub: Hub, deadline_s: float) -> str | None:
    import httpx

    try:
        response = httpx.get(f"{address}/api/datasets/{checked_name(hub)}", timeout=deadline_s)
    except httpx.HTTPError as error:
        return f"{address} cannot be reached ({error or type(error).__name__})"
    except (ValueError, httpx.InvalidURL) as error:
        return f"{address} is not a usable address ({error})"
    if response.status_code >= 500 or response.status_code == 404:
        return f"{address} answered {response.status_code} for {hub.dataset}"
    return None


def checked_name(hub: Hub) -> str:
    """The data set's name, which becomes part of URLs and paths. Raises UsageError for invalid characters."""
    if not _NAME.fullmatch(hub.dataset) or ".." in hub.dataset:
        raise UsageError(f"{hub.dataset!r} is not the name of a data set; write owner/name")
    return hub.dataset


def stream(hub: Hub) -> Iterator[FileRecord]:
    """Records in file order. Errors of ``datasets`` and of the network are passed on."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    # The default of twenty retries of five seconds is for long downloads; here the profile is the fallback.
    datasets.config.STREAMING_READ_MAX_RETRIES = 3
    datasets.config.STREAMING_OPEN_MAX_RETRIES = 3
    return _files(hub) if hub.files else _split(hub, datasets)


def _split(hub: Hub, datasets: Any) -> Iterator[FileRecord]:
    options = {"columns": list(hub.columns)} if hub.columns else {}
    name, common = checked_name(hub), {"split": hub.split, "revision": hub.revision, "streaming": True}
    try:
        rows = datasets.load_dataset(name, **common, **options)
    except ValueError as error:
        if "columns" not in str(error):
            raise
        rows = datasets.load_dataset(name, **common)  # not Parquet, so that columns cannot be selected
    for index, row in enumerate(rows, start=1):
        yield FileRecord(None, index, row)


def _files(hub: Hub) -> Iterator[FileRecord]:
    # datasets' JSON builder reads a whole array before its first record; reading in pieces gives the same records.
    from datasets.utils.file_utils import xopen

    root = f"hf://datasets/{checked_name(hub)}@{hub.revision}"
    for file in hub.files:
        url = f"zip://{file}::{root}/{hub.archive}" if hub.archive else f"{root}/{file}"
        with xopen(url, "rb") as stream:
            yield from read_json(stream, f"{hub.dataset}/{file}")


class Cache:
    """Selected records on disk, one file per data set, selection and number of sessions."""

    def __init__(self, folder: Path, key: str, hub: Hub) -> None:
        slug = re.sub(r"[^\w-]+", "-", checked_name(hub))
        digest = hashlib.sha256(f"{key}|{hub}".encode()).hexdigest()[:16]
        self._folder, self._stem = folder, f"{slug}-{digest}"

    def find(self, sessions: int) -> Path | None:
        """The smallest file with at least ``sessions`` sessions, or with the whole data set; None if there is none."""
        found = []
        for path in self._folder.glob(f"{self._stem}-*.jsonl"):
            size = path.stem.rpartition("-")[2]
            if size == "all" or (size.isdigit() and int(size) >= sessions):
                found.append((float("inf") if size == "all" else int(size), path))
        return min(found)[1] if found else None

    def keep(self, records: Iterable[Any], sessions: int | None) -> Path:
        """Write the records atomically; ``sessions`` None means that the data set holds no more."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self._stem}-{'all' if sessions is None else sessions}.jsonl"
        aside = path.with_suffix(f".{os.getpid()}.part")
        with aside.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
        aside.replace(path)
        return path


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """``$XDG_CACHE_HOME/ebbench/datasets``, by default under ``~/.cache``."""
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ebbench" / "datasets"
