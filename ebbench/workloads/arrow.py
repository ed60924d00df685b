"""Builds Arrow arrays directly from numpy buffers.

``pyarrow.array`` imports pandas, if installed, to check for a Series, which costs a quarter of a second at the start of
every command.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def bits(mask: npt.NDArray[np.bool_]) -> pa.Array:
    """A boolean array."""
    return pa.Array.from_buffers(pa.bool_(), len(mask), [None, _packed(mask)])


def ints(values: npt.NDArray[Any], kind: pa.DataType, valid: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    """An integer array of type ``kind``; null where ``valid`` is False."""
    data = np.ascontiguousarray(values, dtype=kind.to_pandas_dtype())
    validity = None if valid is None or valid.all() else _packed(valid)
    return pa.Array.from_buffers(kind, len(data), [validity, pa.py_buffer(data)])


def strings(texts: Sequence[str]) -> pa.Array:
    """A UTF-8 array; unpaired surrogates, which JSON may contain, become question marks."""
    encoded = [text.encode(errors="replace") for text in texts]
    offsets = _offsets([len(text) for text in encoded])
    return pa.Array.from_buffers(
        pa.string(), len(encoded), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    )


def int_lists(rows: Sequence[Sequence[int] | None]) -> pa.Array:
    """An array of int64 lists, null where a row is None."""
    flat = np.fromiter((value for row in rows if row is not None for value in row), np.int64)
    valid = np.fromiter((row is not None for row in rows), np.bool_, len(rows))
    return int_lists_of(flat, [0 if row is None else len(row) for row in rows], valid)


def int_lists_of(flat: npt.NDArray[Any], sizes: Sequence[int], valid: npt.NDArray[np.bool_]) -> pa.Array:
    """An array of int64 lists of these sizes, null where ``valid`` is False; ``flat``: their values, one after another.

    Raises OverflowError for more values than one array holds.
    """
    return pa.Array.from_buffers(
        pa.list_(pa.int64()),
        len(valid),
        [None if valid.all() else _packed(valid), pa.py_buffer(_offsets(sizes))],
        children=[ints(flat, pa.int64())],
    )


def _packed(mask: npt.NDArray[np.bool_]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(mask, bitorder="little"))


def _offsets(sizes: Sequence[int]) -> npt.NDArray[np.int32]:
    ends = np.cumsum(np.asarray(sizes, np.int64))
    if len(ends) and ends[-1] > np.iinfo(np.int32).max:
        raise OverflowError("a column of more than 2 GiB; ask for fewer prompts, or build the plan without text")
    return np.concatenate([[0], ends]).astype(np.int32)
