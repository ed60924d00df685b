"""Synthetic images: small PNG files whose pixels differ, so that no server takes one for another."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np

_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def png(content: int, number: int, side: int) -> bytes:
    """A PNG of ``side`` x ``side`` RGB pixels, a function of the content stream and the image's number in it.

    The first line is random, the rest is black: the pixels are unlike those of other images, and the file is small.
    """
    generator = np.random.default_rng([content & ((1 << 64) - 1), number])
    lines = np.zeros((side, 1 + 3 * side), np.uint8)  # each line begins with its filter type, 0
    lines[0, 1:] = generator.integers(0, 256, 3 * side)
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 1)), (b"IEND", b""))
    return _SIGNATURE + b"".join(_chunk(kind, data) for kind, data in parts)


def image_url(content: int, number: int, side: int) -> str:
    """The image as the ``data:`` URL of a chat message."""
    return f"data:image/png;base64,{base64.b64encode(png(content, number, side)).decode()}"


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
