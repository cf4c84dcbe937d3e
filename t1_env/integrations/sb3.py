"""Stable-Baselines3 on one task: PPO learns to pick the right commands from a small menu.

``python -m t1_env.integrations.sb3 --timesteps 2048 --out runs/sb3`` trains on ``seeds/hello-file`` and writes a learning curve. It is a
smoke test of the wrappers, not a way to train a terminal agent: a menu of commands is no language.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from t1_env._version import __version__
from t1_env.errors import ConfigError, DependencyMissing, T1Error
from t1_env.protocol import EndReason
from t1_env.tasks import load_task
from t1_env.testing import oracle_actions
from t1_env.wrappers import make_sb3_env

DISTRACTORS: Final = ("true", "ls -l", "pwd", "cat hello.txt", "touch hello.txt", "rm -f hello.txt")
"""Commands that do not help, or undo what helped; beside the task's own solution they make up the menu."""
_WINDOW: Final = 50


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """One training episode.

    Args:
        timesteps: Steps taken by the learner when it ended.
        return_: Sum of its rewards.
        length: Its steps.
        solved: Whether every verifier passed.
    """

    timesteps: int
    return_: float
    length: int
    solved: bool


def build_menu(task_id: str, seed: int) -> list[str]:
    """Return the commands of the task's solution among distractors, in an order drawn from ``seed``.

    Args:
        task_id: A task with a solution.
        seed: Seed of the order.

    Returns:
        The commands.
    """
    menu = [str(action) for action in oracle_actions(load_task(task_id))] + list(DISTRACTORS)
    random.Random(seed).shuffle(menu)
    return menu


@dataclass(frozen=True, slots=True)
class StableBaselines:
    """What this script uses of Stable-Baselines3."""

    ppo: Any
    base_callback: Any
    monitor: Any
    dummy_vec_env: Any


def require_sb3() -> StableBaselines:
    """Import Stable-Baselines3, or raise ``DependencyMissing`` with the command that installs it."""
    try:
        from stable_baselines3 import PPO
        from stable_baselines3.common.callbacks import BaseCallback
        from stable_baselines3.common.monitor import Monitor
        from stable_baselines3.common.vec_env import DummyVecEnv
    except ImportError as error:
        raise DependencyMissing(
            f"Stable-Baselines3 cannot be imported ({error.name} is missing): python -m pip install 't1-terminal[sb3]'"
        ) from error
    return StableBaselines(PPO, BaseCallback, Monitor, DummyVecEnv)


def train(task_id: str, *, timesteps: int, seed: int, max_turns: int = 8, n_steps: int = 128) -> tuple[list[EpisodeRecord], list[str]]:
    """Train SB3's PPO on one task.

    Args:
        task_id: Id of a task with a solution.
        timesteps: Environment steps.
        seed: Seed of the learner, the environment and the menu's order.
        max_turns: Steps of an episode.
        n_steps: Steps between two updates.

    Returns:
        One record for each finished episode, and the menu (without the submission at its end).

    Raises:
        DependencyMissing: If Stable-Baselines3 is not installed.
    """
    sb3 = require_sb3()
    records: list[EpisodeRecord] = []

    class Recorder(sb3.base_callback):  # type: ignore[misc, name-defined]
        def _on_step(self) -> bool:
            for info in self.locals["infos"]:
                episode = info.get("episode")
                if episode is not None and info["end_reason"] != EndReason.INFRA_FAILURE:
                    solved = info["verifiers_passed"] == info["verifiers_total"]
                    records.append(EpisodeRecord(self.num_timesteps, float(episode["r"]), int(episode["l"]), solved))
            return True

    menu = build_menu(task_id, seed)
    env: Any = sb3.dummy_vec_env([lambda: sb3.monitor(make_sb3_env(task_id, menu, max_turns=max_turns, verbatim=False))])
    try:
        learner = sb3.ppo(
            "MultiInputPolicy", env, n_steps=n_steps, batch_size=64, learning_rate=1e-3, ent_coef=0.02, gamma=0.95, seed=seed, device="cpu"
        )
        learner.learn(timesteps, callback=Recorder())
    finally:
        env.close()
    return records, menu


def write_results(out: Path, records: Sequence[EpisodeRecord], summary: dict[str, Any]) -> None:
    """Write ``curve.csv``, ``curve.png`` (when matplotlib is installed) and ``summary.json``.

    Args:
        out: An existing directory.
        records: The training episodes.
        summary: What to write beside them.
    """
    with (out / "curve.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["episode", "timesteps", "return", "length", "solved"])
        writer.writerows([index, r.timesteps, r.return_, r.length, int(r.solved)] for index, r in enumerate(records))
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    _plot(out / "curve.png", records, summary)


def _plot(path: Path, records: Sequence[EpisodeRecord], summary: dict[str, Any]) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        sys.stderr.write("matplotlib is not installed: no curve.png\n")
        return
    steps = [record.timesteps for record in records]
    returns = np.array([record.return_ for record in records])
    smooth = [float(returns[max(0, index - _WINDOW + 1) : index + 1].mean()) for index in range(len(returns))]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, returns, ".", alpha=0.25, label="episode return")
    axes.plot(steps, smooth, linewidth=2, label=f"mean of the last {_WINDOW} episodes")
    axes.axhline(summary["verifiers_total"], linestyle="--", color="grey", label="every verifier passes")
    axes.set(xlabel="environment steps", ylabel="return (verifiers)", title=f"SB3 PPO on {summary['task']}")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def _summary(records: Sequence[EpisodeRecord], **settings: Any) -> dict[str, Any]:
    first, last = records[:_WINDOW], records[-_WINDOW:]
    return {
        **settings,
        "version": __version__,
        "episodes": len(records),
        "mean_return_first": round(float(np.mean([record.return_ for record in first])), 3),
        "mean_return_last": round(float(np.mean([record.return_ for record in last])), 3),
        "solved_rate_first": round(float(np.mean([record.solved for record in first])), 3),
        "solved_rate_last": round(float(np.mean([record.solved for record in last])), 3),
        "window_episodes": _WINDOW,
    }


def prepare_directory(out: Path) -> None:
    """Make the output directory, or raise ``ConfigError`` when it cannot be written or holds results already."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output directory {out} cannot be made: {error.strerror}; choose another with --out") from error
    if not os.access(out, os.W_OK | os.X_OK):
        raise ConfigError(f"output directory {out} is not writable; choose another with --out")
    if (out / "summary.json").exists():
        raise ConfigError(f"output directory {out} holds results already, and results are never overwritten; choose another with --out")


def free_directory(parent: Path) -> Path:
    """Return the first of ``parent/sb3-000``, ``parent/sb3-001``, ... that does not exist."""
    return next(path for path in (parent / f"sb3-{number:03d}" for number in itertools.count()) if not path.exists())


def run(task_id: str, *, timesteps: int, seed: int, out: Path) -> dict[str, Any]:
    """Train and write the results.

    Args:
        task_id: Id of a task with a solution.
        timesteps: Environment steps.
        seed: Seed.
        out: Directory for the results; made if missing.

    Returns:
        The summary.
    """
    require_sb3()
    prepare_directory(out)
    started_s = time.monotonic()
    records, menu = train(task_id, timesteps=timesteps, seed=seed)
    if not records:
        raise ConfigError(f"no episode ended within {timesteps} steps; ask for more with --timesteps")
    seconds = time.monotonic() - started_s
    total = _verifiers_total(task_id)
    summary = _summary(records, task=task_id, menu=menu, timesteps=timesteps, seed=seed, seconds=round(seconds, 1), verifiers_total=total)
    write_results(out, records, summary)
    return summary


def _verifiers_total(task_id: str) -> int:
    env = make_sb3_env(task_id, ["true"])
    try:
        _, info = env.reset(seed=0)
        return int(info["verifiers_total"])
    finally:
        env.close()


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line.

    Args:
        argv: Arguments; default ``sys.argv[1:]``.

    Returns:
        0, or 2 for a mistake in what was asked.
    """
    parser = argparse.ArgumentParser(
        prog="python -m t1_env.integrations.sb3", description="Train SB3's PPO on one task with a command menu."
    )
    parser.add_argument("--task", default="seeds/hello-file", help="id of a task with a solution (default: seeds/hello-file)")
    parser.add_argument("--timesteps", type=_positive, default=2048, metavar="N", help="environment steps (default: 2048)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed (default: 0)")
    parser.add_argument("--out", type=Path, default=None, metavar="DIR", help="where to write the curve (default: a new runs/sb3-NNN)")
    arguments = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the networks are tiny: more threads only fight over the cores
    out = arguments.out or free_directory(Path("runs"))
    try:
        summary = run(arguments.task, timesteps=arguments.timesteps, seed=arguments.seed, out=out)
    except T1Error as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    sys.stdout.write(
        f"{summary['episodes']} episodes in {summary['seconds']} s: mean return {summary['mean_return_first']} -> "
        f"{summary['mean_return_last']} of {summary['verifiers_total']}, solved {summary['solved_rate_first']:.0%} -> "
        f"{summary['solved_rate_last']:.0%}; wrote {out}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
