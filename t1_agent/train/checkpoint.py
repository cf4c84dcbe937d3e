"""Checkpoints that survive ``kill -9``: written aside, forced to disk, then renamed into place.

A checkpoint is a directory ``checkpoints/<sequence>-<label>/`` that holds the actor as a Hugging Face directory and the critic
(``model/``), optimiser and random states (``state.pt``, loadable with ``weights_only=True``) and ``meta.json``. It exists whole or not at
all.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from t1_agent.models.actor_critic import ActorCritic
from t1_agent.train.rundir import sync_directory
from t1_agent.train.seeds import random_states
from t1_env.errors import ConfigError

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands; what ``meta.json`` says.

    Args:
        sequence: Number of the checkpoint, rising.
        label: ``"actor"``, ``"critic"``, ``"iteration"`` or ``"done"``: what was completed last.
        iteration: PPO iterations completed.
        weight_version: Version of the actor's weights.
        metrics_bytes: Size of ``metrics.jsonl`` at this point.
        config_digest: Digest of the run's configuration.
    """

    sequence: int
    label: str
    iteration: int
    weight_version: int
    metrics_bytes: int
    config_digest: str


def save_checkpoint(directory: Path, model: ActorCritic, state: dict[str, Any], progress: Progress) -> Path:
    """Write a checkpoint.

    Args:
        directory: The run's ``checkpoints/``.
        model: Actor and critic.
        state: Tensors, numbers, strings and containers of them (optimisers and the like); random states are added.
        progress: Where the run stands.

    Returns:
        The new checkpoint's directory.
    """
    target = directory / f"{progress.sequence:04d}-{progress.label}"
    staging = directory / f".{target.name}.partial"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    model.save(staging / "model")
    torch.save({**state, "random_states": random_states()}, staging / "state.pt")
    (staging / "meta.json").write_text(json.dumps({"format": _FORMAT, **asdict(progress)}, indent=1) + "\n", encoding="utf-8")
    for folder, _, files in os.walk(staging):
        for name in files:
            _sync_file(Path(folder) / name)
        sync_directory(Path(folder))
    staging.rename(target)
    sync_directory(directory)
    return target


def _sync_file(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def read_progress(checkpoint: Path) -> Progress:
    """Read a checkpoint's ``meta.json``.

    Raises:
        ConfigError: It is missing, unreadable or of another format.
    """
    try:
        meta = json.loads((checkpoint / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"checkpoint {checkpoint}: meta.json cannot be read ({error})") from None
    if meta.pop("format", None) != _FORMAT:
        raise ConfigError(f"checkpoint {checkpoint}: another format, this version of t1-agent reads {_FORMAT}")
    return Progress(**meta)


def list_checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in directory.glob("[0-9][0-9][0-9][0-9]-*") if path.is_dir())


def load_checkpoint(checkpoint: Path) -> tuple[ActorCritic, dict[str, Any], Progress]:
    """Read a checkpoint; the global random states are left alone (they are in ``state["random_states"]``).

    Returns:
        (actor and critic, state as given to ``save_checkpoint`` plus ``random_states``, progress).
    """
    progress = read_progress(checkpoint)
    state: dict[str, Any] = torch.load(checkpoint / "state.pt", weights_only=True)
    return ActorCritic.load(checkpoint / "model"), state, progress


def prune_checkpoints(directory: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` iteration checkpoints, and what unfinished writes left. Phase ends stay."""
    for partial in directory.glob(".*.partial"):
        shutil.rmtree(partial)
    iterations = [path for path in list_checkpoints(directory) if path.name.endswith("-iteration")]
    for path in iterations[:-keep]:
        # Renamed first: a kill in mid-deletion must not leave half a checkpoint under a valid name.
        doomed = path.with_name(f".{path.name}.partial")
        path.rename(doomed)
        shutil.rmtree(doomed)
