"""What the commands that touch a run do, between parsing and the library."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console

from t1_agent.assembly import Assembly, check_tasks
from t1_agent.config import RunConfig, build_config
from t1_agent.eval.report import write_report
from t1_agent.train.checkpoint import list_checkpoints, load_checkpoint
from t1_agent.train.loop import train
from t1_agent.train.rundir import RunDir, open_run
from t1_env.errors import ConfigError

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def train_run(config: RunConfig, *, resume: bool, quiet: bool) -> Path:
    """Train to the end of the configuration and write the report.

    Args:
        config: The run.
        resume: Continue a run of that name.
        quiet: Print no progress.

    Returns:
        Path of the report.
    """
    check_tasks(config)
    run = open_run(config, resume=resume)
    assembly = Assembly(config, run, _talker(quiet=quiet))
    try:
        train(config, run, assembly.parts())
    finally:
        assembly.close()
        run.close()
    return write_report(run.path)


def evaluate_run(path: Path, *, tag: str, instances: int | None) -> Path:
    """Evaluate the newest checkpoint of a run under a new tag and write the report again. Touches nothing else of the run.

    Args:
        path: Directory of the run.
        tag: Name of the evaluation.
        instances: Number of held-out instances, or None for the run's own.

    Returns:
        Path of the report.

    Raises:
        ConfigError: If the path holds no run, the run has no checkpoint yet, or the tag cannot be used.
    """
    require_run(path)
    if _TAG.fullmatch(tag) is None:
        raise ConfigError(f"--tag {tag!r}: expected letters, digits, dots, dashes and underscores")
    if (path / "eval" / f"{tag}.json").exists():
        raise ConfigError(f"{path} already has an evaluation {tag!r}: evaluations are never overwritten; pass another --tag")
    if instances is not None and instances < 1:
        raise ConfigError(f"--instances {instances}: expected 1 or more")
    config = build_config(json.loads((path / "config.json").read_text(encoding="utf-8")))
    if instances is not None:
        config = config.model_copy(update={"eval": config.eval.model_copy(update={"instances": instances})})
    run = RunDir(path)
    checkpoints = list_checkpoints(run.checkpoints)
    if not checkpoints:
        raise ConfigError(f"{path} has no checkpoint yet: there is no policy to evaluate")
    torch.set_num_threads(config.threads)
    assembly = Assembly(config, run, _talker(quiet=False))
    try:
        model, _, progress = load_checkpoint(checkpoints[-1])
        actor = assembly.build_actor(0)
        actor.load_state_dict(model.actor.state_dict())
        _, evaluator, sink = assembly.connect(actor)
        sink.push(actor, progress.weight_version)
        evaluator.evaluate(tag)
    finally:
        assembly.close()
    return write_report(path)


def require_run(path: Path) -> None:
    """Raise ``ConfigError`` unless ``path`` is the directory of a run."""
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} is not the directory of a run: expected a config.json in it; runs are made by t1-agent train")


def _talker(*, quiet: bool) -> Callable[[str], None]:
    """Progress lines on standard error, each with the time since the start."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    started = time.monotonic()
    handler = _Lines(lambda line: console.print(line, markup=False))
    handler.setLevel(logging.WARNING)
    logger = logging.getLogger("t1_agent")
    if not any(isinstance(known, _Lines) for known in logger.handlers):
        logger.addHandler(handler)

    def say(line: str) -> None:
        if not quiet:
            seconds = int(time.monotonic() - started)
            console.print(f"[{seconds // 60:02d}:{seconds % 60:02d}] {line}", markup=False)

    return say


class _Lines(logging.Handler):
    """Warnings of the library as plain lines."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        super().__init__()
        self._line = emit

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        self._line(f"{record.levelname.lower()}: {record.getMessage()}")
