"""One run as a tree of settings, and the same settings by name, as files and the command line give them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from typing import Any, NamedTuple

import msgspec

from ebbench.config.declare import (
    CLIENT,
    CLUSTER,
    DEFAULT_DEVICE,
    DEFAULT_MODEL,
    ENGINE,
    LABELS,
    MOST_SECONDS,
    OUTPUT,
    Declared,
    check_ranges,
    declare,
    declared_in,
)
from ebbench.config.topology import MOST_UNITS, TopologySpec
from ebbench.errors import UsageError
from ebbench.spec.client import ClientOptions
from ebbench.spec.server import (
    ENGINE_ALONE,
    VIRTUAL_TIME,
    EngineOptions,
    HostCosts,
    drafts_synchronously,
    is_server,
    version_defaults,
    with_acceptance,
)
from ebbench.workloads.options import PlanOptions, fitted_acceptance, is_recorded, scenario_meant

MOST_LETTERS = 200
_UNPRINTED = re.compile(r"[\x00-\x1f\x7f]")


def read_tags(given: Sequence[str]) -> dict[str, Any]:
    """``--tag nightly --tag main``, or both after one: ``--tag nightly,main``."""
    tags = [tag.strip() for text in given for tag in text.split(",")]
    return {"tags": tuple(dict.fromkeys(tags))}


@dataclass(frozen=True)
class Labels:
    """Labels of the runs of a command. Raises UsageError for one that is empty or does not fit on a line."""

    name: str | None = declare(None, "Name of these runs, as `ebbench runs` and `trend` find them.", LABELS)
    tags: tuple[str, ...] = declare(
        (), "Tag of these runs; may be repeated.", LABELS, names=("--tag",), text=list[str], read=read_tags
    )
    note: str | None = declare(None, "What is special about these runs; shown by `ebbench runs show`.", LABELS)
    commit: str | None = declare(None, "Commit of what is measured. Default: that of the CI job.", LABELS)
    label: str | None = declare(
        None, "Branch or pull request of what is measured. Default: that of the CI job.", LABELS
    )

    def __post_init__(self) -> None:
        given = [("--name", self.name), ("--note", self.note), ("--commit", self.commit), ("--label", self.label)]
        for option, text in [*given, *(("--tag", tag) for tag in self.tags)]:
            if text is not None and not text.strip():
                raise UsageError(f"{option} is empty; give it a text, or leave it out")
            if option == "--name" and text in (".", ".."):
                raise UsageError(f"{option} {text} would mean a directory wherever runs are named; give another")
            if text is not None and (_UNPRINTED.search(text) or len(text) > MOST_LETTERS):
                raise UsageError(f"{option} must be one line of at most {MOST_LETTERS} letters")

    def in_job(self, environ: Mapping[str, str]) -> Labels:
        """The same with commit and label of the CI job that runs this process, where they are not given."""
        job = ci_job(environ)
        return replace(self, commit=self.commit or job.commit or None, label=self.label or job.label or None)


OF_LABELS = tuple(declared_in(Labels))
"""The names of these settings."""


# What common CI systems say of the job that they run. A pull request is named before its branch: a branch of a fork may
# have any name, `main` too.


class Job(NamedTuple):
    """Commit and branch or pull request of a CI job; empty where none is known."""

    commit: str = ""
    label: str = ""


class _System(NamedTuple):
    """Variables of a CI system. ``sign``: set in all of its jobs; ``request``: the number of a pull request, which some
    set to ``false`` or write at the end of a URL, after ``word``."""

    sign: str
    commit: str
    request: str
    branch: str
    word: str = "PR"


_SYSTEMS = (
    _System("GITLAB_CI", "CI_COMMIT_SHA", "CI_MERGE_REQUEST_IID", "CI_COMMIT_REF_NAME", "MR"),
    _System("BUILDKITE", "BUILDKITE_COMMIT", "BUILDKITE_PULL_REQUEST", "BUILDKITE_BRANCH"),
    _System("CIRCLECI", "CIRCLE_SHA1", "CIRCLE_PULL_REQUEST", "CIRCLE_BRANCH"),
    _System("TF_BUILD", "BUILD_SOURCEVERSION", "SYSTEM_PULLREQUEST_PULLREQUESTNUMBER", "BUILD_SOURCEBRANCHNAME"),
    _System("BITBUCKET_BUILD_NUMBER", "BITBUCKET_COMMIT", "BITBUCKET_PR_ID", "BITBUCKET_BRANCH"),
    _System("TRAVIS", "TRAVIS_COMMIT", "TRAVIS_PULL_REQUEST", "TRAVIS_BRANCH"),
    _System("DRONE", "DRONE_COMMIT_SHA", "DRONE_PULL_REQUEST", "DRONE_BRANCH"),
    _System("TEAMCITY_VERSION", "BUILD_VCS_NUMBER", "", ""),
    _System("JENKINS_URL", "GIT_COMMIT", "CHANGE_ID", "GIT_BRANCH"),
    _System("GITHUB_ACTIONS", "GITHUB_SHA", "", "GITHUB_REF_NAME"),
)
_GITHUB_REQUEST = re.compile(r"refs/pull/(\d+)/")


def ci_job(environ: Mapping[str, str]) -> Job:
    """The CI job of this environment."""
    system = next((known for known in _SYSTEMS if environ.get(known.sign)), None)
    if system is None:
        return Job()
    number = re.search(r"(\d+)/?$", environ.get(system.request, ""))
    if system.sign == "GITHUB_ACTIONS":
        number = _GITHUB_REQUEST.match(environ.get("GITHUB_REF", ""))
    label = f"{system.word} {number[1]}" if number else environ.get(system.branch, "").removeprefix("origin/")
    commit = environ.get(system.commit, "")
    return Job("" if commit == "HEAD" else commit.strip(), label.strip())


# Several instances: topology, dispatch policies, replicas.


@dataclass(frozen=True)
class ClusterOptions:
    """Several instances; None where not given. A scenario file may also contain a topology."""

    topology: TopologySpec | str | None = declare(
        None, "dp=4, 2p2d, tp=4,dp=8,ep=32, ... or a TOML file with a \\[topology] table.", CLUSTER, text=str, file=True
    )
    link: str | None = declare(
        None, "Kind of link between the GPUs of a server: pcie, nvlink, ...; see `ebbench devices show`.", CLUSTER
    )
    dispatch: str | None = declare(
        None, "round-robin, least-outstanding (default), power-of-two, prefix-affine, iqr or sbs\\[:key=value,...].",
        CLUSTER, complete="dispatch",
    )  # fmt: skip
    decode_dispatch: str | None = declare(None, "Dispatch policy of the decode pool. Default: iqr with sbs.", CLUSTER)
    replicas: int | None = declare(
        None,
        "Engines behind a dispatcher: vLLM servers and the gateway, or simulated ones.",
        CLUSTER,
        at_least=1,
        at_most=MOST_UNITS,
    )

    def __post_init__(self) -> None:
        check_ranges(self)

    def named(self) -> ClusterOptions:
        """The same with the topology's label, for tables and file names."""
        topology = self.topology
        return replace(self, topology=topology.label) if isinstance(topology, TopologySpec) else self


def read_goodput(texts: Sequence[str]) -> dict[str, str]:
    """``--goodput``, once or repeated."""
    return {"goodput": " ".join(texts)}


@dataclass(frozen=True)
class RunSpec:
    """Everything that determines the result of one run."""

    plan: PlanOptions
    policy: str = declare(
        "v1", "A policy; repeat for several on the same plan. Default: v1 and ebplus; v1 with a decode pool.", ENGINE,
        names=("--policy", "-p"), complete="policies", text=list[str],
    )  # fmt: skip
    engine: str = declare("sim", "auto, sim, emulated, vllm or a server's URL.", ENGINE, complete="engines")
    device: str | None = declare(
        None,
        "See `ebbench devices list`. Default: rtx-pro-6000; for vllm, this machine.",
        ENGINE,
        complete="devices",
        file=True,
    )
    """None: this machine's GPU if the engine uses it, else the default."""
    model: str | None = declare(
        None, "Name, or path of a Hugging Face config.json. Default: qwen3-8b.", ENGINE, names=("--model", "-m"),
        complete="models", file=True,
    )  # fmt: skip
    server: EngineOptions = field(default_factory=EngineOptions)
    cluster: ClusterOptions = field(default_factory=ClusterOptions)
    client: ClientOptions = field(default_factory=ClientOptions, hash=False)
    labels: Labels = field(default_factory=Labels, compare=False)
    """Changes no result; not part of the key."""
    calibration: str | None = declare(
        None,
        "Costs of this machine for eb, ebplus, marginal and slochunk in engine vllm (`ebbench calibrate`).",
        ENGINE,
        file=True,
    )
    cost: str = declare("auto", "Which cost model a device uses: tables, roofline or auto.")
    ramp_up_s: float | None = declare(
        None, "Seconds over which the load grows to its full size.", CLIENT, at_most=MOST_SECONDS
    )
    goodput: str = declare("", "Limits in ms: ttft:500 tpot:50 e2el:5000.", OUTPUT, text=list[str], read=read_goodput)
    vllm_options: tuple[str, ...] = declare((), "Arguments for `vllm serve`.")
    host: HostCosts | None = None
    """Replaces the device's host constants."""
    shuffle: bool = False
    """Change the order of the requests."""
    weight: float = field(default=1.0, compare=False)
    """Estimated cost, by which work is ordered (largest first); not part of the key."""
    assume_decoder: bool = declare(
        False, "Read a config.json of an unknown type or with unknown keys as an ordinary decoder; results say so.",
        ENGINE, names=("--assume-decoder",),
    )  # fmt: skip

    @property
    def real_time(self) -> bool:
        """Whether the run takes real time on hardware that other runs must not use meanwhile."""
        return self.engine not in VIRTUAL_TIME

    def changed(self, **settings: Any) -> RunSpec:
        """The same run with other values for settings of any section, by name.

        ``max_model_len`` sets the limit of the plan and of the server.
        """
        own = {name: value for name, value in settings.items() if name in _OWN}
        for part, kind in _SECTIONS.items():
            chosen = {name: value for name, value in settings.items() if name in _names(kind)}
            if part == "server" and chosen.get("max_model_len", 0) is None:
                chosen["max_model_len"] = EngineOptions.max_model_len
            if chosen:
                own[part] = replace(getattr(self, part), **chosen)
        known = _OWN.union(*map(_names, _SECTIONS.values()))
        if unknown := [name for name in settings if name not in known]:
            raise TypeError(f"a run has no {unknown[0]}")
        return replace(self, **own)


_SECTIONS: Mapping[str, type] = {
    "plan": PlanOptions, "server": EngineOptions, "cluster": ClusterOptions, "labels": Labels,
}  # fmt: skip
_OWN = frozenset(member.name for member in fields(RunSpec))
_FIRST = ("workload", "policy", "engine", "device", "model", "scenario", "seed", "num_prompts", "source")


def _names(kind: type) -> frozenset[str]:
    return frozenset(member.name for member in fields(kind))


@cache
def known_settings() -> Mapping[str, Declared]:
    """Every declared setting by name, the most important ones first."""
    settings: dict[str, Declared] = {}
    for part, kind in (("plan", PlanOptions), ("", RunSpec), ("server", EngineOptions), ("cluster", ClusterOptions),
                       ("client", ClientOptions), ("labels", Labels)):  # fmt: skip
        for name, declared in declared_in(kind, part).items():
            settings.setdefault(name, declared)
    settings["max_model_len"] = declared_in(EngineOptions, "server")["max_model_len"]
    return {name: settings[name] for name in (*_FIRST, *(name for name in settings if name not in _FIRST))}


_OPTION = re.compile(r"`ebbench [^`]*`|(?<![\w-])--([a-z][a-z-]*)")
"""An option; or a command, whose options stay what they are."""


def named_as_keys(text: str) -> str:
    """A text whose options are named as keys of files: ``max_num_seqs`` for ``--max-num-seqs``."""
    return _OPTION.sub(_key, text)


def _key(option: re.Match[str]) -> str:
    if option[1] is None:
        return option[0]
    for name, declared in known_settings().items():
        if option[0] in declared.option_names:
            return f"{name}=False" if declared.option is not None and declared.option.turns_off else name
    return option[1].replace("-", "_")


def make_spec(settings: Mapping[str, Any], *, with_text: bool | None = None) -> RunSpec:
    """The run with these settings by name; others have their defaults. Raises UsageError for an invalid value.

    A rate without a scenario means Poisson arrivals. Plans of simulated engines contain no text, unless ``with_text``
    says so. A server keeps its own length limit unless ``max_model_len`` is given.
    """
    parts: dict[str, dict[str, Any]] = {"plan": {}, "": {}, "server": {}, "cluster": {}, "client": {}, "labels": {}}
    for name, value in settings.items():
        parts[known_settings()[name].part][name] = value
    engine = settings.get("engine", RunSpec.engine)
    plan, server, own = parts["plan"], parts["server"], parts[""]
    plan["scenario"] = scenario_meant(
        plan["workload"], plan.get("scenario"), plan.get("request_rate"), plan.get("burstiness")
    )
    if server.get("speculative") is not None:
        server["speculative"] = with_acceptance(server["speculative"], fitted_acceptance(plan["workload"]))
    if engine in VIRTUAL_TIME:
        own = {"device": DEFAULT_DEVICE, "model": DEFAULT_MODEL, **own}
        server = version_defaults(server.get("vllm_version")) | server
    elif drafts_synchronously(own.get("vllm_options", ())):
        server["async_scheduling"] = False
    limit = server.pop("max_model_len", None)
    plan["max_model_len"] = limit if is_server(engine) else limit or EngineOptions.max_model_len
    plan["with_text"] = engine not in VIRTUAL_TIME if with_text is None else with_text
    return RunSpec(
        PlanOptions(**plan, counts_answers=is_server(engine)),
        server=EngineOptions(max_model_len=limit or EngineOptions.max_model_len, **server),
        cluster=ClusterOptions(**parts["cluster"]),
        client=ClientOptions(**parts["client"]),
        labels=Labels(**parts["labels"]),
        **own,
    )


def simulated(
    workload: str,
    policy: str,
    device: str,
    model: str,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    scenario: str | None = None,
    *,
    warmup: int = 0,
    async_scheduling: bool = True,
    shuffle: bool = False,
    weight: float = 1.0,
    topology: TopologySpec | str | None = None,
    dispatch: str | None = None,
    decode_dispatch: str | None = None,
    vllm_version: str | None = None,
    in_front: bool = False,
    **plan: Any,
) -> RunSpec:
    """A simulated run of a workload's length profile, or of a trace; ``plan``: fields of PlanOptions.

    ``max_model_len`` among them is also the server's limit. ``in_front``: what a server has between its clients and its
    engine is simulated too. Published runs are repeated without: their devices were fitted on times of the engine.
    """
    given = {name: value for name, value in plan.items() if value is not None}
    source = "auto" if is_recorded(workload) else given.pop("source", "profile")
    options = EngineOptions(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=given.get("max_model_len", EngineOptions.max_model_len),
        async_scheduling=async_scheduling,
        warmup=warmup,
        vllm_version=vllm_version,
        **({} if in_front else ENGINE_ALONE),
    )
    return RunSpec(
        PlanOptions(workload, scenario, with_text=False, **({**given, "source": source})),
        policy,
        device=device,
        model=model,
        server=options,
        cluster=ClusterOptions(topology, dispatch=dispatch, decode_dispatch=decode_dispatch),
        shuffle=shuffle,
        weight=weight,
    )


def settings_of(spec: RunSpec) -> dict[str, Any]:
    """All declared settings of a run, in the order of :func:`known_settings`."""
    settings = {
        name: getattr(getattr(spec, declared.part) if declared.part else spec, name)
        for name, declared in known_settings().items()
    }
    settings["max_model_len"] = spec.plan.max_model_len
    if isinstance(spec.cluster.topology, TopologySpec):
        settings["topology"] = spec.cluster.topology.label
    return settings


def as_dict(spec: RunSpec) -> dict[str, Any]:
    """The tree as nested dictionaries, as JSON stores it; without labels, which change no result."""
    topology = spec.cluster.topology
    content = asdict(replace(spec, cluster=replace(spec.cluster, topology=None)))
    del content["labels"]
    content["cluster"]["topology"] = msgspec.to_builtins(topology)
    return content


def stored_form(spec: RunSpec) -> dict[str, Any]:
    """The tree as it is written beside a result: without values of headers, which may be secret."""
    content = as_dict(spec)
    content["client"]["headers"] = list(spec.client.headers)
    return content
