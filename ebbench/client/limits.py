"""Requests the server cannot take: refused before anything is sent, or left out on request."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from ebbench.errors import UsageError


def fitting(table: pa.Table, max_model_len: int | None, drop_too_long: bool) -> frozenset[int]:
    """Rows to leave out because prompt and answer exceed ``max_model_len`` tokens (None: no limit known).

    Raises UsageError where there are such rows and they are not to be dropped, or where nothing is left.
    """
    if max_model_len is None:
        return frozenset()
    total = table.column("input_tokens").to_numpy() + table.column("output_tokens").to_numpy()
    rows = np.flatnonzero(total > max_model_len)
    if rows.size == 0:
        return frozenset()
    if not drop_too_long:
        name = table.column("request_id")[int(rows[0])].as_py()
        raise UsageError(
            f"{rows.size} of {table.num_rows} requests exceed the server's max_model_len {max_model_len} "
            f"(first: {name}, {total[rows[0]]} tokens); shorten them or drop them with --drop-too-long"
        )
    if rows.size == table.num_rows:
        raise UsageError(f"every request exceeds the server's max_model_len {max_model_len}; shorten them")
    return frozenset(rows.tolist())
