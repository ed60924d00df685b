"""Times of collectives among the GPUs of one server: measured tables, else the formula of one link."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ebbench.devices import library
from ebbench.devices.kerneltables import select, source
from ebbench.devices.profiles import DeviceProfile, Link
from ebbench.devices.surfaces import Array, lower_envelope
from ebbench.errors import UnknownNameError, UsageError
from ebbench.records.warnings import caveat

GRAPH_TOKENS = 512  # vLLM captures CUDA graphs up to this many tokens per step; larger steps call collectives eagerly

SIZES = tuple(1 << power for power in range(10, 31))
"""Bytes at which the library is asked."""


@dataclass(frozen=True)
class Collectives:
    """Times (s) of collectives among ``gpus`` GPUs of ``profile`` over the link named ``link``."""

    profile: DeviceProfile
    link: str
    gpus: int

    @property
    def _link(self) -> Link:
        return self.profile.links[self.link]

    @property
    def _device(self) -> str:
        """The device whose tables are read."""
        return self.profile.collectives_from or self.profile.name

    @property
    def measured(self) -> bool:
        """Whether vLLM's all-reduce was measured on this device or its stand-in, link and number of GPUs."""
        return self._points("all_reduce", "graph") is not None

    @property
    def provenance(self) -> str:
        """The link, and the source of its times."""
        if self.measured:
            whose = f" of {self._device}" if self.profile.collectives_from else ""
            packaged = select("collective", device=self._device, link=self.link, gpus=self.gpus).num_rows
            text = source("collective") if packaged else f"{library.LABEL} (Apache-2.0)"
            return f"link {self.link} ({self._link.note}): {text}{whose}"
        return f"link {self.link} ({self._link.note}): {self._link.bytes_per_s / 1e9:g} GB/s, a formula{self._bounds}"

    @property
    def warnings(self) -> tuple[str, ...]:
        """A warning if the times come from another device or from the formula."""
        of = {"gpus": self.gpus, "device": self.profile.name, "link": self.link}
        if self.measured:
            lent = (caveat("collectives-lent", **of, taken_from=self._device),)
            return lent if self.profile.collectives_from else ()
        ring = {"bytes_per_s": self._link.bytes_per_s, "latency_s": self._link.latency_s}
        return (caveat("collectives-formula", **of, **ring, bounds=self._bounds),)

    @property
    def _lower(self) -> list[Collectives]:
        """Measured collectives that cannot be slower: of fewer GPUs over this link, of as many over a faster one."""
        faster = [name for name, link in self.profile.links.items() if link.bytes_per_s > self._link.bytes_per_s]
        others = [replace(self, gpus=count) for count in (2, 4) if count < self.gpus]
        return [one for one in (*others, *(replace(self, link=name) for name in faster)) if one.measured]

    @property
    def _bounds(self) -> str:
        named = [f"on {one.gpus} GPUs" if one.link == self.link else f"over {one.link}" for one in self._lower]
        return f", and at least that measured {' and '.join(named)}" if named else ""

    def all_reduce_s(self, tokens: Array, token_bytes: float, *, eager: bool = False) -> Array:
        """All-reduce of ``tokens`` (an array of counts) of ``token_bytes`` per token; 0 for no tokens."""
        return self._by_tokens("all_reduce", tokens, token_bytes, eager)

    def all_gather_s(self, tokens: Array, token_bytes: float) -> Array:
        """All-gather: every GPU ends with the ``tokens`` of all."""
        return self._by_tokens("all_gather", tokens, token_bytes, True)

    def reduce_scatter_s(self, tokens: Array, token_bytes: float) -> Array:
        """Reduce-scatter: sums over GPUs of all ``tokens``, each GPU ending with its own."""
        return self._by_tokens("reduce_scatter", tokens, token_bytes, True)

    def _by_tokens(self, operation: str, tokens: Array, token_bytes: float, eager: bool) -> Array:
        size = tokens * token_bytes
        slow = self._seconds(operation, size, "eager")
        if eager or operation != "all_reduce":
            return slow
        return np.where(tokens <= GRAPH_TOKENS, self._seconds(operation, size, "graph"), slow)

    def _seconds(self, operation: str, size: Array, mode: str) -> Array:
        """Time of one call over ``size`` bytes."""
        points = self._points(operation, mode)
        if points is not None:
            sizes, times = points
            found = np.interp(size, sizes, times) * np.maximum(size / sizes[-1], 1.0)
        elif operation != "all_reduce":
            found = self._seconds("all_reduce", size / 2, mode)  # half the data of an all-reduce
        else:
            share = 2 * (self.gpus - 1) / self.gpus
            found = self._link.latency_s + share * size / self._link.bytes_per_s
        for one in () if self.measured else self._lower:
            found = np.maximum(found, one._seconds(operation, size, mode))
        return np.where(size > 0, found, 0.0)

    def _points(self, operation: str, mode: str) -> tuple[Array, Array] | None:
        table = select(
            "collective", device=self._device, link=self.link, operation=operation, mode=mode, gpus=self.gpus
        ).to_pydict()
        if not table["bytes"]:
            return self._from_library(operation)
        order = np.argsort(table["bytes"])
        times = np.array(table["time_us"], dtype=float)[order] * 1e-6
        return np.array(table["bytes"], dtype=float)[order], lower_envelope(times, 0)

    def _from_library(self, operation: str) -> tuple[Array, Array] | None:
        """Sizes and times by the library, which knows one link of each GPU, of a GPU that no packaged table has."""
        if self.link != next(iter(self.profile.links)) or select("collective", device=self._device).num_rows:
            return None
        found = library.collective(self.profile, operation, self.gpus, SIZES)
        return None if found is None or not found.origin.exact else (found.points, np.maximum.accumulate(found.times))


def choose_link(profile: DeviceProfile, wanted: str = "") -> str:
    """The link named ``wanted``, or the device's first.

    Raises UnknownNameError, or UsageError if the profile has none.
    """
    if wanted and wanted not in profile.links:
        raise UnknownNameError(f"link of {profile.name}", wanted, tuple(profile.links))
    if not profile.links:
        raise UsageError(
            f"the profile of {profile.name} names no link between its GPUs; add one to the device file, for example "
            '[links.pcie] with bytes_per_s = 25e9 and note = "PCIe 4 x16"'
        )
    return wanted or next(iter(profile.links))
