"""A vLLM plugin for tests: two collectives that vLLM's CPU backend lacks, so that ranks can share a layer of experts.

In vLLM 0.32, data-parallel ranks of a mixture-of-experts model gather the tokens of all ranks before the experts, and
add the experts' shares up after them. Of the methods for that, ``CpuCommunicator`` accepts ``allgather_reducescatter``
alone, whose manager calls ``all_gatherv`` and ``reduce_scatterv``. ``CpuCommunicator`` has neither: those of its base
class raise NotImplementedError. Here they are, over gloo.
"""

from __future__ import annotations

from typing import Any


def add_collectives() -> None:
    """Give vLLM's CPU communicator the missing methods. Called by vLLM in each of its processes."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv


def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """The rows of all ranks, one after the other; ``sizes``: how many rows each has. gloo needs equal numbers."""
    import torch

    if isinstance(input_, list):
        return [all_gatherv(self, one, dim, sizes) for one in input_]
    assert dim == 0
    sizes = sizes or [len(input_)] * self.world_size
    padded = input_.new_zeros((max(sizes), *input_.shape[1:]))
    padded[: len(input_)] = input_
    parts = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(parts, padded, group=self.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def reduce_scatterv(self: Any, input_: Any, dim: int = -1, sizes: list[int] | None = None) -> Any:
    """This rank's rows of the sum over all ranks; ``sizes``: how many rows each has."""
    import torch

    assert dim == 0
    sizes = sizes or [len(input_) // self.world_size] * self.world_size
    total = input_.clone()
    torch.distributed.all_reduce(total, group=self.device_group)
    begin = sum(sizes[: self.rank_in_group])
    return total[begin : begin + sizes[self.rank_in_group]].clone()
