"""Counts the tokens of texts: with a tokenizer if one is given, else estimated from UTF-8 bytes.

The estimate is one token per four bytes, rounded up. English text has about four characters per token with current
tokenizers; scripts with three-byte characters about one and a third. In measurements the server's ``usage`` is used
instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ebbench.errors import UsageError
from ebbench.records.warnings import RunWarning, warning
from ebbench.workloads.requests import Int32s

BYTES_PER_TOKEN = 4


@dataclass(frozen=True)
class ByteEstimate:
    """One token per four UTF-8 bytes."""

    description: str = f"estimated, one token per {BYTES_PER_TOKEN} bytes of UTF-8"
    warnings: tuple[RunWarning, ...] = (warning("tokens-estimated", bytes_per_token=BYTES_PER_TOKEN),)

    def count(self, texts: Sequence[str]) -> Int32s:
        """Tokens of each text, rounded up."""
        sizes = np.fromiter((len(text.encode(errors="replace")) for text in texts), np.int64, len(texts))
        return (-(-sizes // BYTES_PER_TOKEN)).astype(np.int32)

    def cut(self, text: str, tokens: int) -> str:
        """The first ``tokens`` times four bytes, without cutting a character."""
        if len(text) <= tokens:  # a character has one to four bytes
            return text
        return text.encode(errors="replace")[: tokens * BYTES_PER_TOKEN].decode(errors="ignore")


@dataclass(frozen=True)
class TokenizerCount:
    """Counts by a tokenizer of the ``tokenizers`` library, without special tokens."""

    tokenizer: Any
    description: str
    warnings: tuple[RunWarning, ...] = ()

    def count(self, texts: Sequence[str]) -> Int32s:
        """Tokens of each text."""
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return np.fromiter((len(encoding) for encoding in encodings), np.int32, len(texts))

    def cut(self, text: str, tokens: int) -> str:
        """The text up to the end of token number ``tokens``."""
        offsets = self.tokenizer.encode(text, add_special_tokens=False).offsets
        return text if len(offsets) <= tokens else text[: offsets[tokens - 1][1]]


TokenCounter: TypeAlias = ByteEstimate | TokenizerCount
"""Counts tokens of texts and cuts texts to a number of tokens; ``description`` and ``warnings`` are of the counts."""


def token_counter(tokenizer: str | None) -> TokenCounter:
    """Counter for a tokenizer's file, folder or hub name; the byte estimate for None or an unavailable one.

    Raises UsageError for a file or folder that is not a tokenizer.
    """
    if tokenizer is None:
        return ByteEstimate()
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return _estimate(f"tokenizer {tokenizer!r} not used: the package 'tokenizers' is not installed")
    path = Path(tokenizer).expanduser()
    if path.exists():
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            return TokenizerCount(Tokenizer.from_file(str(file)), f"tokenizer {file}")
        except Exception as error:  # the library raises plain Exception
            raise UsageError(f"{file} is not a tokenizer.json that can be read: {error}") from None
    try:
        return TokenizerCount(Tokenizer.from_pretrained(tokenizer), f"tokenizer {tokenizer}")
    except Exception as error:  # hub not reachable or name unknown: the library raises plain Exception
        return _estimate(f"tokenizer {tokenizer!r} not used: {str(error).splitlines()[0][:200]}")


def load_tokenizer(tokenizer: str | None) -> TokenizerCount | None:
    """The counter of a tokenizer; None without one, and for one that is not available.

    Raises UsageError as :func:`token_counter` does.
    """
    counter = token_counter(tokenizer)
    return counter if isinstance(counter, TokenizerCount) else None


def _estimate(reason: str) -> ByteEstimate:
    return ByteEstimate(warnings=(warning("tokens-estimated", bytes_per_token=BYTES_PER_TOKEN, why=reason),))
