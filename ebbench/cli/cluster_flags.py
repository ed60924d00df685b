"""Options of ``ebbench run`` for several instances: topology, dispatch policies, replicas."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from ebbench.cli import completion
from ebbench.cli.options import opt

PANEL = "Several instances"


_opt = partial(opt, panel=PANEL)

Tp = Annotated[int, _opt("--tp", help="GPUs that share the model by tensor parallelism.")]
Link = Annotated[
    str | None,
    _opt("--link", help="Kind of link between the GPUs of a server: pcie, nvlink, ...; see `ebbench devices show`."),
]


@dataclass(frozen=True)
class ClusterOptions:
    """The given options, None if not given. The fields are the arguments of ``engines.setup.with_cluster``."""

    topology: Annotated[
        str | None,
        _opt("--topology", help="dp=4, 2p2d, tp=4,dp=8,ep=32, ... or a TOML file with a \\[topology] table."),
    ] = None
    link: Link = None
    dispatch: Annotated[
        str | None,
        _opt(
            "--dispatch",
            help="round-robin, least-outstanding (default), power-of-two, prefix-affine, iqr or sbs\\[:key=value,...].",
            complete=completion.dispatch,
        ),
    ] = None
    decode_dispatch: Annotated[
        str | None, _opt("--decode-dispatch", help="Dispatch policy of the decode pool. Default: iqr with sbs.")
    ] = None
    replicas: Annotated[
        int | None,
        _opt("--replicas", help="Engines behind a dispatcher: vLLM servers and the gateway, or simulated ones."),
    ] = None


def check_tp(tp: int, link: str | None) -> None:
    """Raise UsageError for a number of GPUs below 1, and for a link of a single GPU."""
    from ebbench.engines.checks import check_counts
    from ebbench.errors import UsageError

    check_counts(tp=tp)
    if link is not None and tp == 1:
        raise UsageError(f"--link {link} joins the GPUs of one server: give --tp too, for example --tp 2")
