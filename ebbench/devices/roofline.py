"""Step times from data-sheet rates: the fallback for devices or models without measurements."""

from __future__ import annotations

from dataclasses import dataclass

from ebbench.devices.base import Drafter, StepShape
from ebbench.devices.geometry import ModelGeometry, decode_flops, pair_flops
from ebbench.devices.profiles import DeviceProfile
from ebbench.spec.server import HostCosts

# Shares of the data-sheet rates that large kernels reach; those of the profiled GPUs are within 10 %.
COMPUTE_SHARE = 0.70
BANDWIDTH_SHARE = 0.80


@dataclass(frozen=True)
class RooflineAttention:
    """Attention of all layers of one kind. ``kv_bytes``: read per token before a query; ``pair_flops`` and
    ``decode_flops``: operations per pair of a query and a key, in prompts and in decodes; ``window``: most tokens that
    a query reads, 0: all; ``state_bytes``: of a sequence, read and written in every step, and written
    once more per drafted token."""

    kv_bytes: float
    pair_flops: float
    decode_flops: float
    window: int = 0
    state_bytes: float = 0.0


@dataclass(frozen=True)
class RooflineCost:
    """Each layer takes the longer of its arithmetic and its memory traffic; attention is added."""

    dense_params: float  # parameters used by every token, without the language head
    expert_params: float  # parameters of all experts together, in all layers
    expert_share: float  # share of the experts one token uses
    head_params: float
    attention: tuple[RooflineAttention, ...]
    dense_bytes: float  # of the dense parameters in memory
    expert_bytes: float
    head_bytes: float
    flops_per_s: float
    bytes_per_s: float
    host: HostCosts
    drafter: Drafter | None = None
    overlap: bool = False  # asynchronous scheduling: the host's time counts only if it is longer than the GPU's

    def step_s(self, shape: StepShape) -> float:
        """Time (s) of one step."""
        tokens = shape.decode_seqs + shape.draft_tokens + sum(chunk for chunk, _ in shape.prefill)
        attention = sum(self._attention_s(kind, shape) for kind in self.attention)
        active = self.dense_params + self.expert_params * self.expert_share
        touched = self.expert_bytes * (1.0 - (1.0 - self.expert_share) ** tokens)
        layers = max(
            2.0 * tokens * active / self.flops_per_s,
            (self.dense_bytes + touched) / self.bytes_per_s,
        )
        head = self._head_s(shape.sampled_seqs + shape.draft_tokens)
        sequences = shape.decode_seqs + len(shape.prefill)
        host, gpu = self.host.step_s + self.host.sequence_s * sequences, layers + head + attention
        if (drafter := self.drafter) is not None:
            weights = (self.dense_bytes + touched) / self.bytes_per_s
            drafted = drafter.passes if shape.next_drafts is None else shape.next_drafts
            passes = max(drafted, 1)  # the first also runs for the drafter's own KV
            layer = max(layers, weights) + (passes - 1) * max(layers * sequences / tokens, weights)
            gpu += drafter.layer_share * (layer + passes * attention)
            gpu += drafted * drafter.head_share * self._head_s(sequences)
        return max(host, gpu) if self.overlap else host + gpu

    def _head_s(self, rows: int) -> float:
        return max(
            2.0 * rows * self.head_params / self.flops_per_s, self.head_bytes / self.bytes_per_s if rows else 0.0
        )

    def _attention_s(self, kind: RooflineAttention, shape: StepShape) -> float:
        kv_tokens = shape.decode_kv_tokens
        if kind.window:
            kv_tokens = min(kv_tokens, shape.decode_seqs * kind.window)
        queries = 1.0 + shape.draft_tokens / shape.decode_seqs if shape.draft_tokens else 1.0
        time = max(
            kv_tokens * kind.kv_bytes / self.bytes_per_s, queries * kv_tokens * kind.decode_flops / self.flops_per_s
        )
        for chunk, context in shape.prefill:
            pairs = chunk * (context + 0.5 * (chunk + 1))
            if kind.window:
                context = min(context, kind.window)
                pairs = min(pairs, chunk * (context + 0.5 * (min(chunk, kind.window) + 1)))
            time += max(pairs * kind.pair_flops / self.flops_per_s, context * kind.kv_bytes / self.bytes_per_s)
        sequences = shape.decode_seqs + len(shape.prefill)
        return time + (sequences * 2.0 + shape.draft_tokens) * kind.state_bytes / self.bytes_per_s


def roofline_cost(
    profile: DeviceProfile, model: ModelGeometry, host: HostCosts, *, overlap: bool = False
) -> RooflineCost:
    """Build the cost model from the profile's data-sheet rates and the model's shape."""
    experts = model.expert_layers * model.experts * model.expert_params
    total = model.layer_params
    attention = tuple(
        RooflineAttention(
            kv_bytes=mixer.layers * mixer.reads * model.kv_dtype_bytes,
            pair_flops=mixer.layers * pair_flops(mixer),
            decode_flops=mixer.layers * decode_flops(mixer) if mixer.latent else 0.0,
            window=mixer.window,
            state_bytes=mixer.layers * mixer.state_bytes,
        )
        for mixer in model.mixers
    )
    return RooflineCost(
        dense_params=total - experts,
        expert_params=experts,
        expert_share=model.experts_per_token / model.experts if model.experts else 0.0,
        head_params=model.vocab * model.hidden,
        attention=attention,
        dense_bytes=model.weight_bytes
        - model.encoder_bytes
        - model.experts_bytes
        - model.embedding_params * model.dtype_bytes,
        expert_bytes=model.experts_bytes,
        head_bytes=model.vocab * model.hidden * model.dtype_bytes,
        overlap=overlap,
        flops_per_s=profile.bf16_flops_per_s * COMPUTE_SHARE,
        bytes_per_s=profile.bandwidth_bytes_per_s * BANDWIDTH_SHARE,
        host=host,
    )
