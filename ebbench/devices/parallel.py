"""How the GPUs of one engine share a model."""

from __future__ import annotations

from dataclasses import dataclass

from ebbench.devices.geometry import ModelGeometry
from ebbench.errors import UsageError


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
        """Raise UsageError if the model cannot be divided in this way."""
        if model.heads % self.tp or (self.tp > model.kv_heads and self.tp % model.kv_heads):
            raise UsageError(
                f"{model.name} has {model.heads} attention and {model.kv_heads} KV heads, which {self.tp} GPUs cannot "
                f"share evenly; use a tp that divides {model.heads}"
            )
        if self.ep > 1 and not model.experts:
            raise UsageError(
                f"{model.name} has no experts to spread over ep={self.ep}; leave ep out, or choose an MoE model"
            )
        if self.ep > 1 and model.experts % self.ep:
            raise UsageError(f"{model.name} has {model.experts} experts, which ep={self.ep} cannot share evenly")


SINGLE = Parallel()
