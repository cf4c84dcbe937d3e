"""The directory a run owns: created once, never overwritten, continued only on request."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from t1_agent.config import RunConfig, differing_keys
from t1_env.errors import ConfigError

_FOLDERS = ("tb", "rollouts", "checkpoints", "report")


class RunDir:
    """``<runs_dir>/<name>/{config.json, metrics.jsonl, tb/, rollouts/, checkpoints/, report/}``. Made by ``open_run``.

    Args:
        path: The directory; it exists.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._board: Any = None

    @property
    def config_file(self) -> Path:
        """The resolved configuration as JSON."""
        return self.path / "config.json"

    @property
    def metrics_file(self) -> Path:
        """One JSON object a line: ``{"phase", "step", metrics...}``."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """One directory a checkpoint."""
        return self.path / "checkpoints"

    @property
    def rollouts(self) -> Path:
        """Episodes as parquet."""
        return self.path / "rollouts"

    @property
    def report(self) -> Path:
        """The rendered report."""
        return self.path / "report"

    def log(self, phase: str, step: int, metrics: dict[str, float]) -> None:
        """Append one line of metrics, and the same to TensorBoard where that is installed. Values that are not finite become null."""
        clean = {name: (value if math.isfinite(value) else None) for name, value in sorted(metrics.items())}
        with self.metrics_file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"phase": phase, "step": step, **clean}) + "\n")
        if self._board is not None:
            for name, number in clean.items():
                if number is not None:
                    self._board.add_scalar(f"{phase}/{name}", number, step)
            self._board.flush()

    def metrics_size_bytes(self) -> int:
        """Bytes of metrics so far, forced to disk: a checkpoint remembers it."""
        if not self.metrics_file.exists():
            return 0
        with self.metrics_file.open("rb+") as stream:
            os.fsync(stream.fileno())
            return stream.seek(0, os.SEEK_END)

    def truncate_metrics(self, size_bytes: int) -> None:
        """Forget the lines written after a checkpoint, so that doing the work again does not write them twice.

        Raises:
            ConfigError: The file is shorter than the checkpoint says.
        """
        size = self.metrics_file.stat().st_size if self.metrics_file.exists() else 0
        if size < size_bytes:
            raise ConfigError(
                f"{self.metrics_file}: {size} bytes, the checkpoint remembers {size_bytes}; the file was changed from outside"
            )
        if size > size_bytes:
            os.truncate(self.metrics_file, size_bytes)

    def open_tensorboard(self) -> bool:
        """Start writing ``tb/`` beside ``metrics.jsonl``. Returns False where TensorBoard is not installed."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return False
        self._board = SummaryWriter(str(self.path / "tb"))
        return True

    def close(self) -> None:
        """Close the TensorBoard writer. Idempotent."""
        board, self._board = self._board, None
        if board is not None:
            board.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read ``metrics.jsonl``; a line that was cut by a crash at the very end is left out, and a run that logged nothing yet has none."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    # The last piece is what follows the last newline: empty, or a line that was never finished.
    return [json.loads(line) for line in lines[:-1]]


def open_run(config: RunConfig, *, resume: bool = False) -> RunDir:
    """Create the run's directory, or continue one.

    Args:
        config: The run's configuration.
        resume: Continue what is there; a directory that does not exist yet is then created.

    Returns:
        The directory, with its configuration written.

    Raises:
        ConfigError: The directory holds a run and ``resume`` is not set; it holds a run of another configuration (the keys are named);
            it holds something else; or it cannot be written.
    """
    path = Path(config.runs_dir) / config.name
    if path.is_dir() and any(path.iterdir()):
        _check_existing(path, config, resume)
    try:
        for folder in _FOLDERS:
            (path / folder).mkdir(parents=True, exist_ok=True)
        run = RunDir(path)
        if not run.config_file.exists():
            write_atomically(run.config_file, json.dumps(config.resolved(), indent=1) + "\n")
        elif not os.access(path, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise ConfigError(f"run directory {path} cannot be written ({error.strerror}); choose another with --runs_dir") from None
    return run


def _check_existing(path: Path, config: RunConfig, resume: bool) -> None:
    stored = path / "config.json"
    if not resume:
        raise ConfigError(
            f"run directory {path} is not empty and runs are never overwritten; add --resume to continue it, or pick another --name"
        )
    if not stored.is_file():
        # A kill between creating the folders and writing the configuration leaves empty folders and nothing else.
        if any(entry.name not in _FOLDERS or not entry.is_dir() or any(entry.iterdir()) for entry in path.iterdir()):
            raise ConfigError(f"run directory {path} holds no config.json: it is not a run of t1-agent; pick another --name")
        return
    before = json.loads(stored.read_text(encoding="utf-8"))
    if keys := differing_keys(before, config.resolved()):
        shown = ", ".join(f"{key} ({_value(before, key)} -> {_value(config.resolved(), key)})" for key in keys)
        raise ConfigError(f"cannot resume {path}: the configuration changed in {shown}; restore it, or start another run with --name")


def _value(data: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        data = data.get(part) if isinstance(data, dict) else None
    return data


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all, also after a power cut."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Force a directory's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
