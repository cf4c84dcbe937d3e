"""Random streams of a run: every phase and iteration gets a seed of its own, so that resuming lands on the same numbers."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch


def derive_seed(*parts: object) -> int:
    """A seed in [0, 2^31) named by its parts, the same on every machine: ``derive_seed(run_seed, "collect", iteration)``."""
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


def seed_everything(seed: int) -> None:
    """Seed random, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - third-party code draws from the legacy global generator
    torch.manual_seed(seed)


def random_states() -> dict[str, Any]:
    """States of the global generators, as values that ``torch.load(weights_only=True)`` accepts."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002 - see seed_everything
    version, internal, gauss_next = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "numpy": (str(name), torch.from_numpy(np.asarray(keys, dtype=np.int64)), int(position), int(has_gauss), float(gauss)),
        "random": (version, torch.tensor(internal, dtype=torch.int64), gauss_next),
    }


def restore_random_states(states: dict[str, Any]) -> None:
    """Undo ``random_states``."""
    torch.set_rng_state(states["torch"])
    name, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))  # noqa: NPY002 - see seed_everything
    version, internal, gauss_next = states["random"]
    random.setstate((version, tuple(internal.tolist()), gauss_next))
