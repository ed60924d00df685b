"""Attention surfaces from data-sheet rates, for layers that no kernel table has: MLA, indices, states."""

from __future__ import annotations

import numpy as np

from ebbench.devices.attention import MAX_CHUNK
from ebbench.devices.mixers import Mixer, decode_flops, pair_flops
from ebbench.devices.profiles import DeviceProfile
from ebbench.devices.roofline import BANDWIDTH_SHARE, COMPUTE_SHARE
from ebbench.devices.surfaces import BEFORE, CHUNKS, CONTEXTS, SEQS, Surfaces

LAUNCHES_S = 5e-6
"""Two small kernels per layer and step."""
KINDS_IN_WORDS = {
    "latent": "latent (MLA) attention",
    "index": "an index of keys",
    "state": "a state per sequence in place of attention (linear attention, Mamba or convolutions)",
}


def estimated_surfaces(profile: DeviceProfile, mixer: Mixer, element_bytes: float) -> Surfaces:
    """Surfaces of one layer: the longer of arithmetic and memory traffic. ``element_bytes``: of the KV cache."""
    flops_per_s = profile.bf16_flops_per_s * COMPUTE_SHARE
    bytes_per_s = profile.bandwidth_bytes_per_s * BANDWIDTH_SHARE
    seqs, contexts = np.array(SEQS, dtype=float)[:, None], np.array(CONTEXTS, dtype=float)[None, :]
    lengths = np.arange(MAX_CHUNK + 1, dtype=float)
    if mixer.kind == "state":
        each = 2.0 * mixer.state_bytes / bytes_per_s  # read and written
        prompt = lengths * (4.0 * mixer.state_bytes / 2 / flops_per_s)
        prompt[1:] += each
        context = np.zeros_like(lengths)
        decode = np.broadcast_to(seqs * each, (len(SEQS), len(CONTEXTS)))
    else:
        read_s = mixer.reads * element_bytes / bytes_per_s
        pair_s = pair_flops(mixer) / flops_per_s
        prompt, context = lengths**2 / 2 * pair_s, np.maximum(lengths * pair_s, read_s)
        decode = seqs * contexts * max(read_s, decode_flops(mixer) / flops_per_s)
    increment = np.broadcast_to(decode, (len(CHUNKS), len(BEFORE), len(SEQS), len(CONTEXTS)))
    alone = prompt + LAUNCHES_S
    alone[0] = 0.0
    return Surfaces(alone, context, prompt, context, decode + LAUNCHES_S, increment.copy())


def not_measured(mixer: Mixer, layers: int, device: str) -> str:
    """That the times of a kind of layer are an estimate, with its direction."""
    return (
        f"{mixer.layers} of {layers} layers have {KINDS_IN_WORDS[mixer.kind]}, which was not measured on {device}: its "
        "time is a roofline estimate, too fast rather than too slow"
    )
