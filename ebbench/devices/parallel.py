"""How the GPUs of one engine share a model."""

from __future__ import annotations

from dataclasses import dataclass

from ebbench.devices.geometry import Mixer, ModelGeometry
from ebbench.errors import UsageError

BLOCK = 128
"""Rows and columns that share a scale in weights of type ``fp8_block``."""


@dataclass(frozen=True)
class Parallel:
    """``dp`` units of ``tp`` GPUs each. ``ep`` is 1 (every unit holds all experts) or tp x dp (each GPU holds some).

    ``link``: the kind of link between the GPUs; "" is the device's default link.
    """

    tp: int = 1
    dp: int = 1
    ep: int = 1
    link: str = ""

    @property
    def gpus(self) -> int:
        """Number of GPUs of the engine."""
        return self.tp * self.dp

    @property
    def single(self) -> bool:
        """Whether the engine has a single GPU."""
        return self.gpus == 1

    def check(self, model: ModelGeometry) -> None:
        """Raise UsageError if the model cannot be divided in this way; vLLM refuses it as well."""
        for mixer in model.mixers:
            self._check_heads(model.name, mixer)
        self._check_blocks(model)
        if self.ep > 1 and not model.experts:
            raise UsageError(
                f"{model.name} has no experts to spread over ep={self.ep}; leave ep out, or choose an MoE model"
            )
        if self.ep > 1 and model.experts % self.ep:
            raise UsageError(f"{model.name} has {model.experts} experts, which ep={self.ep} cannot share evenly")

    def _check_heads(self, name: str, mixer: Mixer) -> None:
        if mixer.kind == "index":
            return
        kept = mixer.kv_heads or 1
        fewer, more = sorted((self.tp, kept))
        if mixer.heads % self.tp or more % fewer:
            raise UsageError(
                f"{name} has {mixer.heads} attention and {kept} KV heads, which {self.tp} GPUs cannot "
                f"share evenly; use a tp that divides {mixer.heads} and divides {kept} or is a multiple of it"
            )

    def _check_blocks(self, model: ModelGeometry) -> None:
        """Raise UsageError where a slice of weights with a scale per block would end within a block."""
        what, width = ("an expert", model.expert_intermediate) if model.experts else ("the MLP", model.intermediate)
        whole = self.tp == 1 or (model.experts and self.ep > 1)
        if whole or model.dtype_of_experts != "fp8_block" or width % (self.tp * BLOCK) == 0:
            return
        other = ", ep over the same GPUs" if model.experts else ""
        raise UsageError(
            f"{what} of {model.name} has a width of {width:,}, of which {self.tp} GPUs would have {width / self.tp:g} "
            f"each: no multiple of the {BLOCK} that share a scale in FP8, so vLLM does not start; use a smaller "
            f"tp{other} or weights with one scale per tensor"
        )


SINGLE = Parallel()
