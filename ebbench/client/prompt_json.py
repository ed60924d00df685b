"""JSON of synthetic prompts, written from tables of bytes.

A list of 50,000 numbers takes msgspec several milliseconds with the interpreter locked, in which no response can be
timed. Here every token id or word is one fixed-width cell of a table, so that numpy copies whole prompts.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

_FILLER = b"\0"


class PromptTable:
    """The JSON text of each token of a vocabulary, in cells of equal width."""

    def __init__(self, cells: Sequence[bytes], *, text: bool) -> None:
        """``cells``: what stands for each token; ``text``: a JSON string of them, otherwise a JSON array."""
        self._cells = np.array(cells)
        self._text = text

    @staticmethod
    def of_ids(vocab: int) -> PromptTable:
        """Token ids below ``vocab``."""
        return PromptTable([b"%d," % number for number in range(vocab)], text=False)

    @staticmethod
    def of_words(words: Sequence[str]) -> PromptTable:
        """Words that need no escape in JSON, one per token."""
        return PromptTable([f"{word} ".encode() for word in words], text=True)

    def json(self, tokens: npt.NDArray[np.int32]) -> msgspec.Raw:
        """The prompt of these tokens: the JSON array of their ids, or the string of their words."""
        joined = self._cells.take(tokens).tobytes().translate(None, _FILLER)[:-1]
        return msgspec.Raw(b'"%b"' % joined if self._text else b"[%b]" % joined)
