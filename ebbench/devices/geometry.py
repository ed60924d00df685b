"""Shape of a decoder-only transformer: bytes of its weights, KV bytes per token, parameters used per token."""

from __future__ import annotations

from dataclasses import dataclass, replace

# Bits per weight with its share of the scales: one scale per tensor (fp8), per 128 x 128 block, per 32 weights (mxfp4).
WEIGHT_BITS = {"bfloat16": 16.0, "fp8": 8.0, "fp8_block": 8.0, "w4a16_mxfp4": 4.25}
KV_DTYPES = ("auto", "bfloat16", "fp8")


@dataclass(frozen=True)
class ModelGeometry:
    """A dense or mixture-of-experts decoder. ``experts`` 0 is dense; sizes are in elements.

    ``dense_layers`` of a mixture's ``layers`` have a dense MLP of ``dense_intermediate`` in place of experts.
    ``sliding_layers`` of the ``layers`` attend only to the last ``sliding_window`` tokens. ``norms``: norms of the
    hidden size per layer. ``dtype_bytes``: bytes per element of activations, embeddings and language head.
    ``weight_dtype``: type of the projections in the layers; ``expert_dtype``: of the experts ("": as the projections);
    ``kv_dtype``: of the KV cache; names of WEIGHT_BITS, with bfloat16 for any 16-bit type. ``positions``: longest
    sequence in tokens that its config.json allows, 0: not known. ``note``: what is simplified.
    """

    name: str
    hf_id: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied_embeddings: bool = False
    qk_norm: bool = False
    norms: int = 2
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    dense_layers: int = 0
    dense_intermediate: int = 0
    sliding_window: int = 0
    sliding_layers: int = 0
    dtype_bytes: int = 2
    weight_dtype: str = "bfloat16"
    expert_dtype: str = ""
    kv_dtype: str = "bfloat16"
    positions: int = 0
    note: str = ""

    @property
    def dtype_of_experts(self) -> str:
        """Data type of the experts."""
        return self.expert_dtype or self.weight_dtype

    @property
    def plain(self) -> bool:
        """Whether weights and KV cache have 16 bits."""
        return self.dtype_of_experts == self.weight_dtype == self.kv_dtype == "bfloat16"

    @property
    def kv_dtype_bytes(self) -> float:
        """Bytes per element of the KV cache."""
        return WEIGHT_BITS[self.kv_dtype] / 8

    @property
    def experts_bytes(self) -> float:
        """Bytes of all experts of all layers."""
        return self.expert_layers * self.experts * self.expert_params * WEIGHT_BITS[self.dtype_of_experts] / 8

    @property
    def expert_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    def without_experts(self) -> ModelGeometry:
        """The dense layers of a mixture, as a model of their own with all its layers."""
        return replace(self, experts=0, intermediate=self.dense_intermediate, dense_layers=0)

    def sliced(self, tp: int) -> ModelGeometry:
        """The part on one of ``tp`` GPUs: its heads, its slice of the dense MLP and of the vocabulary.

        The hidden size is not divided; neither are the experts, whose tables have their own division. With fewer KV
        heads than GPUs each head is stored more than once (vLLM).
        """
        return replace(
            self,
            heads=self.heads // tp,
            kv_heads=max(self.kv_heads // tp, 1),
            intermediate=-(-self.intermediate // tp),
            shared_intermediate=-(-self.shared_intermediate // tp),
            dense_intermediate=-(-self.dense_intermediate // tp),
            vocab=-(-self.vocab // tp),
        )

    @property
    def qkv_width(self) -> int:
        """Output columns of the fused query, key and value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def attention_params(self) -> int:
        """Parameters of one layer's four attention projections."""
        return self.hidden * self.qkv_width + self.heads * self.head_dim * self.hidden

    @property
    def mlp_params(self) -> int:
        """Parameters of one layer's gated MLP, all experts together; of a mixture, of a layer with experts."""
        if not self.experts:
            return 3 * self.hidden * self.intermediate
        return self.experts * self.expert_params + self.hidden * (self.experts + 3 * self.shared_intermediate)

    @property
    def expert_params(self) -> int:
        """Parameters of one expert."""
        return 3 * self.hidden * self.expert_intermediate

    @property
    def params(self) -> int:
        """All parameters without norms (below 0.01 %)."""
        embeddings = self.vocab * self.hidden * (1 if self.tied_embeddings else 2)
        return self.layer_params + embeddings

    @property
    def layer_params(self) -> int:
        """Parameters of all layers."""
        dense = self.dense_layers * 3 * self.hidden * self.dense_intermediate
        return self.layers * self.attention_params + (self.layers - self.dense_layers) * self.mlp_params + dense

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory."""
        embeddings = self.vocab * self.hidden * (1 if self.tied_embeddings else 2)
        experts = self.expert_layers * self.experts * self.expert_params
        projections = self.params - embeddings - experts
        return int(
            embeddings * self.dtype_bytes + projections * WEIGHT_BITS[self.weight_dtype] / 8 + self.experts_bytes
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """KV cache bytes per token over all layers (a hybrid cache frees more; see capacity)."""
        return int(2 * self.layers * self.kv_heads * self.head_dim * self.kv_dtype_bytes)
