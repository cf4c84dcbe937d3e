"""Checksums of weights, so that a push is verified and not assumed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch


def weights_checksum(state_dict: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> str:
    """Digest names, shapes, dtypes and bytes.

    Args:
        state_dict: Name -> tensor, on any device.
        dtype: Cast floating-point tensors to this first: a trainer in float32 compares with an engine in bfloat16 by passing the
            engine's dtype.

    Returns:
        BLAKE2b of 16 bytes, in hex. Equal if and only if (but for hash collisions) every tensor is bit-equal.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(state_dict):
        tensor = state_dict[name].detach()
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        # Viewed as bytes because numpy has no bfloat16.
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
