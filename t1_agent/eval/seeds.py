"""Several runs of one recipe as one result: the paired gain of PPO over the warm start, over training seeds and tasks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from t1_agent.eval.results import EpisodeResult, EvalResult
from t1_agent.eval.statistics import Interval, bootstrap_mean, paired_difference
from t1_agent.train.rundir import read_metrics
from t1_env.errors import ConfigError

HELD_OUT_PREFIX = "held-out"


@dataclass(frozen=True, slots=True)
class SeedsResult:
    """What the runs say together.

    Args:
        runs: Names of the runs.
        seeds: Their training seeds.
        rows: One for each group of tasks: ``group, n_tasks, before, after, difference`` and ``per_seed`` (before, after) solved rates.
        mismatch: The sampler-against-trainer rows of each run that measured them.
        minutes: Wall time of each run's phases together, where the run logged it.
    """

    runs: tuple[str, ...]
    seeds: tuple[int, ...]
    rows: tuple[dict[str, Any], ...]
    mismatch: tuple[list[dict[str, Any]], ...]
    minutes: tuple[float, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "runs": list(self.runs),
            "seeds": list(self.seeds),
            "rows": [{**row, **{k: row[k].as_dict() for k in ("before", "after", "difference")}} for row in self.rows],
            "mismatch": list(self.mismatch),
            "minutes": list(self.minutes),
        }


def combine_runs(run_dirs: Sequence[Path], *, before: str = "warmstart", after: str = "ppo") -> SeedsResult:
    """Pair two evaluations of each run on the same tasks and combine them over runs.

    Args:
        run_dirs: Finished runs of one recipe that differ in their seed.
        before: Tag of the reference.
        after: Tag of what is compared with it.

    Raises:
        ConfigError: If a run lacks an evaluation, two runs have the same seed, or they were not evaluated on the same tasks.
    """
    configs = [_config(path) for path in run_dirs]
    seeds = [int(config["seed"]) for config in configs]
    if len(set(seeds)) != len(seeds):
        raise ConfigError(f"runs {', '.join(map(str, run_dirs))} have seeds {seeds}: expected a different seed each")
    pairs = [(_evaluation(path, before), _evaluation(path, after)) for path in run_dirs]
    groups = list(dict.fromkeys(episode.group for episode in pairs[0][0].episodes))
    held_in = [group for group in groups if not group.startswith(HELD_OUT_PREFIX)]
    chosen = [("held-out instances of the training families", held_in)] + [(group, [group]) for group in groups]
    rows = tuple(_row(label, members, pairs) for label, members in chosen)
    mismatch = tuple(json.loads((path / "mismatch.json").read_text())["rows"] for path in run_dirs if (path / "mismatch.json").is_file())
    return SeedsResult(tuple(path.name for path in run_dirs), tuple(seeds), rows, mismatch, tuple(_minutes(path) for path in run_dirs))


def _config(path: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} is not the directory of a run: expected a config.json in it") from None
    return config


def _evaluation(path: Path, tag: str) -> EvalResult:
    file = path / "eval" / f"{tag}.json"
    if not file.is_file():
        raise ConfigError(f"{path} has no evaluation {tag!r}: let the run finish (t1-agent train ... --resume)")
    return EvalResult.load(file)


def _solved(episodes: Sequence[EpisodeResult], groups: Sequence[str]) -> dict[str, list[float]]:
    solved: dict[str, list[float]] = {}
    for episode in episodes:
        if episode.group in groups:
            solved.setdefault(episode.task_id, []).append(float(episode.solved))
    return solved


def _row(label: str, groups: Sequence[str], pairs: Sequence[tuple[EvalResult, EvalResult]]) -> dict[str, Any]:
    tables = [[_solved(result.episodes, groups) for result in pair] for pair in pairs]
    tasks = [task for task in tables[0][0] if all(task in table for pair in tables for table in pair)]
    if not tasks:
        raise ConfigError(f"the runs share no evaluated task in {label!r}: they must come from one recipe with one eval.seed")
    first, second = (np.array([[np.mean(pair[side][task]) for task in tasks] for pair in tables]) for side in (0, 1))
    return {
        "group": label,
        "n_tasks": len(tasks),
        "before": _interval(first),
        "after": _interval(second),
        "difference": paired_difference(first, second),
        "per_seed": [[float(a), float(b)] for a, b in zip(first.mean(axis=1), second.mean(axis=1), strict=True)],
    }


def _interval(solved: npt.NDArray[Any]) -> Interval:
    """Over tasks and, with more than one run, seeds."""
    if len(solved) == 1:
        return bootstrap_mean(solved[0])
    return paired_difference(np.zeros_like(solved), solved)


def _minutes(path: Path) -> float:
    """Wall time of what the run logged: seconds of its phases, collections and updates."""
    rows = read_metrics(path / "metrics.jsonl")
    seconds = sum(row.get("time/seconds") or 0.0 for row in rows)
    seconds += sum((row.get("time/collect_s") or 0.0) + (row.get("time/update_s") or 0.0) for row in rows)
    return round(seconds / 60, 1)


def as_markdown(result: SeedsResult) -> str:
    """The combined result as a table."""
    lines = [
        f"Runs: {', '.join(result.runs)} (training seeds {', '.join(map(str, result.seeds))}; "
        f"{', '.join(str(minutes) for minutes in result.minutes)} minutes of logged work).",
        "",
        "| tasks | n | solved after warm start | after PPO | gain, points (95%) | per seed, before to after |",
        "|---|---|---|---|---|---|",
    ]
    for row in result.rows:
        gain: Interval = row["difference"]
        per_seed = ", ".join(f"{100 * a:.0f} to {100 * b:.0f}" for a, b in row["per_seed"])
        lines.append(
            f"| {row['group']} | {row['n_tasks']} | {_percent(row['before'])} | {_percent(row['after'])} "
            f"| {100 * gain.mean:+.1f} ({100 * gain.low:+.1f} to {100 * gain.high:+.1f}) | {per_seed} |"
        )
    return "\n".join(lines) + "\n"


def _percent(interval: Interval) -> str:
    return f"{100 * interval.mean:.1f}% ({100 * interval.low:.1f} to {100 * interval.high:.1f})"
