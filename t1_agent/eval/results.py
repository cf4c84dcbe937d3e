"""What an evaluation found, one line a task, and the tables made from it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from t1_agent.eval.statistics import Interval, bootstrap_mean, paired_difference, wilson
from t1_agent.train.rundir import write_atomically
from t1_agent.types import Trajectory

RESULTS_VERSION = 1


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """One evaluated episode.

    Args:
        task_id: Task played.
        group: What it is counted under: a family name, or ``"held-out: <family>"`` for a family that was never trained on.
        solved: Every verifier passed at the end.
        verifiers_passed: Count at the end.
        verifiers_total: Size of the frozen list.
        turns: Number of turns.
        sampled_tokens: Tokens the policy sampled.
        end_reason: Why it ended.
        seconds: Wall time spent in the environment (sandbox and verifiers).
    """

    task_id: str
    group: str
    solved: bool
    verifiers_passed: int
    verifiers_total: int
    turns: int
    sampled_tokens: int
    end_reason: str
    seconds: float

    @property
    def fraction(self) -> float:
        """Share of the verifiers that passed."""
        return self.verifiers_passed / self.verifiers_total if self.verifiers_total else 0.0


@dataclass(frozen=True, slots=True)
class EvalResult:
    """One evaluation of one policy.

    Args:
        tag: ``"untrained"``, ``"warmstart"``, ``"ppo"`` ...
        episodes: In the order of the evaluation set, so that two evaluations pair by position.
        infra_failures: Episodes dropped because the machinery failed; they are in neither numerator nor denominator.
        seconds: Wall time of the evaluation.
    """

    tag: str
    episodes: tuple[EpisodeResult, ...]
    infra_failures: int
    seconds: float

    def save(self, path: Path) -> None:
        """Write as JSON, atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"version": RESULTS_VERSION, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> EvalResult:
        """Read what ``save`` wrote.

        Raises:
            ValueError: If the file is of another version.
        """
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.get("version") != RESULTS_VERSION:
            raise ValueError(f"{path}: results version {data.get('version')!r}, this version of t1_agent reads {RESULTS_VERSION}")
        episodes = tuple(EpisodeResult(**episode) for episode in data["episodes"])
        return cls(data["tag"], episodes, data["infra_failures"], data["seconds"])


def evaluate_trajectories(tag: str, trajectories: Sequence[Trajectory], groups: Sequence[str], seconds: float) -> EvalResult:
    """Turn evaluated episodes into results.

    Args:
        tag: Name of the policy evaluated.
        trajectories: One a task, in the order of the evaluation set.
        groups: Group of each task, same order.
        seconds: Wall time of the evaluation.
    """
    if len(trajectories) != len(groups):
        raise ValueError(f"evaluation {tag}: got {len(trajectories)} episodes for {len(groups)} tasks")
    kept = [(t, g) for t, g in zip(trajectories, groups, strict=True) if not t.infra_failure]
    episodes = tuple(
        EpisodeResult(
            task_id=trajectory.task_id,
            group=group,
            solved=trajectory.solved,
            verifiers_passed=trajectory.verifiers_passed,
            verifiers_total=trajectory.verifiers_total,
            turns=len(trajectory.turns),
            sampled_tokens=int(trajectory.loss_mask.sum()),
            end_reason=trajectory.end_reason,
            seconds=sum(turn.seconds for turn in trajectory.turns),
        )
        for trajectory, group in kept
    )
    return EvalResult(tag, episodes, len(trajectories) - len(kept), seconds)


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """One row of the results table: solved rate (Wilson) and mean verifiers and mean share of verifiers (bootstrap over tasks)."""

    group: str
    solved: Interval
    verifiers: Interval
    fraction: Interval


def summarise(result: EvalResult) -> list[GroupSummary]:
    """Summaries by group, in order of appearance, then ``"held-in"`` over all trained families."""
    groups: dict[str, list[EpisodeResult]] = {}
    for episode in result.episodes:
        groups.setdefault(episode.group, []).append(episode)
    held_in = [episode for episode in result.episodes if not episode.group.startswith("held-out")]
    rows = [_summary(group, episodes) for group, episodes in groups.items()]
    if held_in and len(groups) > 1:
        rows.append(_summary("trained families, held-out instances", held_in))
    return rows


def _summary(group: str, episodes: Sequence[EpisodeResult]) -> GroupSummary:
    return GroupSummary(
        group,
        wilson(sum(e.solved for e in episodes), len(episodes)),
        bootstrap_mean([float(e.verifiers_passed) for e in episodes]),
        bootstrap_mean([e.fraction for e in episodes]),
    )


def compare(before: EvalResult, after: EvalResult, *, held_out_families: bool = False) -> Interval:
    """Paired difference of the solved rate, ``after - before``, over the tasks that both evaluations scored.

    Args:
        before: Reference policy.
        after: Policy compared.
        held_out_families: Count the families never trained on instead of the held-out instances of trained families.

    Raises:
        ValueError: If the two share no task.
    """
    first, second = (_solved_by_task(result.episodes, held_out_families) for result in (before, after))
    shared = [task for task in first if task in second]
    if not shared:
        raise ValueError(f"evaluations {before.tag!r} and {after.tag!r} share no task")
    return paired_difference([first[task] for task in shared], [second[task] for task in shared])


def _solved_by_task(episodes: Iterable[EpisodeResult], held_out_families: bool) -> dict[str, float]:
    """Mean solved rate a task (a task may be attempted several times)."""
    attempts: dict[str, list[float]] = {}
    for episode in episodes:
        if episode.group.startswith("held-out") == held_out_families:
            attempts.setdefault(episode.task_id, []).append(float(episode.solved))
    return {task: sum(values) / len(values) for task, values in attempts.items()}
