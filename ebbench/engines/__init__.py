"""Engines run a plan under a policy: simulated, in vLLM on an emulated device, in vLLM, or on a server over HTTP."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path

from ebbench.config.server_url import is_server_url
from ebbench.engines.base import Engine
from ebbench.errors import UnknownNameError, UsageError

_HOST_AND_PORT = re.compile(r"(\[[0-9a-fA-F:]+\]|[\w.-]+):\d+(/|$)")
ENGINES = ("auto", "sim", "emulated", "vllm")


def select_engine(name: str) -> tuple[Engine, str]:
    """The engine of that name (or URL), and a sentence that tells the user which engine runs and why."""
    if is_server_url(name):
        from ebbench.engines.endpoint import EndpointEngine

        return EndpointEngine(name), f"engine: the server at {name}"
    if name not in ENGINES and ("://" in name or _HOST_AND_PORT.match(name)):
        address = name.partition("://")[2] or name
        raise UsageError(f"--engine {name}: write a server's URL as http://HOST:PORT" + _hint(address))
    if name not in ENGINES:
        raise UnknownNameError("engine", name, (*ENGINES, "http://HOST:PORT"))
    if name == "auto":
        chosen, why = _automatic()
        engine, _ = select_engine(chosen)
        return engine, f"engine: {chosen} ({why})"
    if name == "sim":
        from ebbench.engines.sim import SimEngine

        return SimEngine(), "engine: sim (vLLM's scheduling rules on an emulated device, virtual time)"
    if name == "emulated":
        from ebbench.engines.emulated import EmulatedEngine

        return EmulatedEngine(), "engine: emulated (the real vLLM scheduler on an emulated device, virtual time)"
    from ebbench.engines.vllm import VllmEngine

    return VllmEngine(), "engine: vllm (a vLLM server started for this run)"


def _hint(address: str) -> str:
    if _HOST_AND_PORT.match(address):
        return f", such as http://{address}"
    return "; Unix sockets and other schemes are not supported"


def chosen_engine(name: str) -> str:
    """The engine that ``auto`` means on this machine; another name is itself."""
    return _automatic()[0] if name == "auto" else name


def _automatic() -> tuple[str, str]:
    if importlib.util.find_spec("vllm") is None:
        return "sim", "vLLM is not installed"
    if not _gpu_visible():
        return "sim", "no GPU is visible"
    return "vllm", "vLLM is installed and a GPU is visible"


def _gpu_visible() -> bool:
    return shutil.which("nvidia-smi") is not None and any(Path("/dev").glob("nvidia[0-9]*"))
