"""The packaged kernel tables: meaning of their rows, and checked reading.

All times are microseconds of one call on one GPU; attention is per layer. ``dtype``: type of the weights, ``kv_dtype``:
of the KV cache: bfloat16, fp8 (one scale per tensor) or fp8_block (one per 128 x 128 weights).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ebbench.devices.profiles import DATA
from ebbench.errors import DataError

_TEXT = pa.string()
_COUNT = pa.int32()


def _schema(*texts: str, counts: tuple[str, ...]) -> pa.Schema:
    fields = [pa.field(name, _TEXT, nullable=False) for name in texts]
    fields += [pa.field(name, _COUNT, nullable=False) for name in counts]
    return pa.schema([*fields, pa.field("time_us", pa.float32(), nullable=False)])


_HEADS = ("heads", "kv_heads", "head_dim")
SCHEMAS = {
    # A matrix product of (tokens x k) and (k x n).
    "gemm": _schema("device", "dtype", counts=("n", "k", "tokens")),
    # Attention of `seqs` one-token queries over `context` keys per query.
    "decode": _schema("device", "kv_dtype", counts=(*_HEADS, "seqs", "context")),
    # Causal attention of `seqs` prompts of `chunk` tokens, without cached tokens.
    "prefill": _schema("device", "kv_dtype", counts=(*_HEADS, "seqs", "chunk")),
    # Fused experts of one layer on one of `tp` GPUs that each hold a slice of every expert, or of `ep` GPUs that each
    # hold some experts; `tokens` are those of all GPUs.
    "moe": _schema(
        "device",
        "dtype",
        counts=("hidden", "expert_intermediate", "experts", "experts_per_token", "tp", "ep", "tokens"),
    ),
    # One layer's call by token count (per sequence for lm_head and sampler), with widths divided by `tp`.
    "layer": _schema("device", "model", "layer", counts=("tp", "tokens")),
    # Joint attention of one prompt chunk (after `before` cached tokens) and `seqs` decodes; 0 means absent.
    "mixed": _schema("device", counts=(*_HEADS, "chunk", "before", "seqs", "context")),
    # A collective among `gpus` GPUs of one server over one kind of link; `bytes` is the size of the whole tensor.
    # `mode` is graph (inside a CUDA graph) or eager.
    "collective": _schema("device", "link", "operation", "mode", counts=("gpus", "bytes")),
}


@cache
def kernel_table(kind: str) -> pa.Table:
    """The packaged table of one kind. Raises DataError if the file is invalid."""
    return read_table(DATA / "kernels" / f"{kind}.parquet", kind)


def read_table(path: Path, kind: str) -> pa.Table:
    """Read and check a kernel table.

    Raises DataError for a wrong column (and hence unit), a hole or a negative time.
    """
    schema = SCHEMAS[kind]
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path}: not a readable Parquet file ({error})") from None
    unknown = [name for name in table.column_names if name not in schema.names]
    missing = [name for name in schema.names if name not in table.column_names]
    if unknown or missing:
        raise DataError(
            f"{path}: column {(unknown or missing)[0]!r} is {'unknown' if unknown else 'missing'}; "
            f"a {kind} table has {', '.join(schema.names)}"
        )
    for name in schema.names:
        if table[name].null_count:
            raise DataError(f"{path}: column {name!r} has a hole")
    table = table.select(schema.names).cast(schema)
    if not pc.all(pc.greater(table["time_us"], 0.0)).as_py():
        raise DataError(f"{path}: column 'time_us' has a value that is not positive")
    return table


def select(kind: str, **equal: str | int) -> pa.Table:
    """Rows of a packaged table where the named columns equal the values."""
    table = kernel_table(kind)
    for name, value in equal.items():
        # Not an expression of pc.field: creating one imports pandas if installed, which takes half a second.
        table = table.filter(pc.equal(table[name], pa.scalar(value)))
    return table


def source(kind: str) -> str:
    """Source of a packaged table, with its licence."""
    metadata = pq.read_schema(DATA / "kernels" / f"{kind}.parquet").metadata
    return f"{metadata[b'source'].decode()} ({metadata[b'licence'].decode()})"
