"""Layers that mix tokens: attention of several kinds, and what stands in its place, with weights, cache and slices."""

from __future__ import annotations

from dataclasses import dataclass, replace

KINDS = ("full", "window", "chunk", "sparse", "latent", "index", "state")
BY_COLUMNS, BY_ROWS, WHOLE = "columns", "rows", "whole"


@dataclass(frozen=True)
class Product:
    """A matrix of ``columns`` outputs and ``rows`` inputs; ``split``: which of them several GPUs share."""

    columns: int
    rows: int
    split: str = BY_COLUMNS

    @property
    def params(self) -> int:
        """Its elements."""
        return self.columns * self.rows

    def sliced(self, tp: int) -> Product:
        """The part on one of ``tp`` GPUs."""
        if self.split == BY_COLUMNS:
            return replace(self, columns=-(-self.columns // tp))
        return replace(self, rows=-(-self.rows // tp)) if self.split == BY_ROWS else self


@dataclass(frozen=True)
class Mixer:
    """``layers`` equal layers of one kind.

    ``full``: every token attends to all before it. ``window``: to the last ``window``, and no more are kept. ``chunk``:
    to those in its piece of ``window`` tokens. ``sparse``: all are kept, ``window`` of them are read. ``latent``: all
    heads share ``latent`` elements and a rotary part per token (MLA). ``index``: the keys by which sparse layers choose
    (of ``heads`` and ``key_dim``). ``state``: a state of fixed size per sequence (Mamba, linear attention, short
    convolutions).

    ``cached``: elements of the KV cache per token and layer, in the cache's type; ``cached_fp8_bytes``: bytes instead
    of these where an FP8 cache has a format of its own; ``cached_bytes``: further bytes, in no type that a server
    chooses; ``state_bytes``: bytes per sequence. ``reads``: elements that a query reads per token before
    it (of a layer that uses another layer's cache, too). ``others``: parameters outside ``products``, in 16 bits.
    ``sizes``: of a gated delta rule, numbers and widths of its heads by the names of the kernels' arguments.
    """

    kind: str
    layers: int
    heads: int = 0
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window: int = 0
    latent: int = 0
    cached: int = 0
    cached_bytes: int = 0
    cached_fp8_bytes: int = 0
    state_bytes: int = 0
    reads: int = 0
    products: tuple[Product, ...] = ()
    others: int = 0
    sizes: tuple[tuple[str, int], ...] = ()

    @property
    def params(self) -> int:
        """Parameters of the products of one layer."""
        return sum(one.params for one in self.products)

    @property
    def measured_alike(self) -> bool:
        """Whether kernel tables of softmax attention with grouped keys hold for it."""
        return self.kind in ("full", "window", "chunk", "sparse")

    @property
    def head_dim(self) -> int:
        """Mean width of keys and values of one head, by which kernel tables know it."""
        return (self.key_dim + self.value_dim) // 2

    def bytes_per_token(self, element_bytes: float) -> float:
        """Bytes of the cache per token that one layer keeps."""
        own_format = self.cached_fp8_bytes if element_bytes == 1 else 0
        return (own_format or self.cached * element_bytes) + self.cached_bytes

    def sliced(self, tp: int) -> Mixer:
        """The part on one of ``tp`` GPUs. With fewer KV heads than GPUs each is stored more than once; latents and
        indices are stored by every GPU."""
        if tp == 1:
            return self
        products = tuple(one.sliced(tp) for one in self.products)
        if self.kind == "index":
            return replace(self, products=products)
        sizes = tuple((name, max(size // tp, 1) if name.startswith("n") else size) for name, size in self.sizes)
        part = replace(
            self, products=products, heads=-(-self.heads // tp), state_bytes=-(-self.state_bytes // tp), sizes=sizes
        )
        if not self.kv_heads:
            return part
        kept = max(self.kv_heads // tp, 1)
        cached, reads = (each * kept // self.kv_heads for each in (self.cached, self.reads))
        return replace(part, kv_heads=kept, cached=cached, reads=reads)


def attention(
    kind: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    key_dim: int,
    value_dim: int = 0,
    *,
    window: int = 0,
    gate: int = 0,
    keys_are_values: bool = False,
    own_cache: bool = True,
) -> Mixer:
    """Softmax attention with grouped keys. ``gate``: further columns beside queries; ``keys_are_values``: one
    projection gives both; without ``own_cache`` a layer reads the cache of another."""
    value_dim = value_dim or key_dim
    kept = kv_heads * (key_dim + value_dim)
    projected = (kv_heads * key_dim if keys_are_values else kept) if own_cache else 0
    return Mixer(
        kind,
        layers,
        heads,
        kv_heads,
        key_dim,
        value_dim,
        window,
        cached=kept if own_cache else 0,
        reads=kept,
        products=(
            Product(heads * key_dim + gate + projected, hidden),
            Product(hidden, heads * value_dim, BY_ROWS),
        ),
    )


def pair_flops(mixer: Mixer) -> float:
    """Operations of one layer per pair of a prompt's query and a key."""
    return 2.0 * mixer.heads * (mixer.key_dim + mixer.value_dim)


def decode_flops(mixer: Mixer) -> float:
    """Operations of one layer per pair of a decode's query and a key: latents are used as they are (absorbed MLA)."""
    return 2.0 * mixer.heads * (mixer.reads + mixer.latent) if mixer.latent else pair_flops(mixer)
