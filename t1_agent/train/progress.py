"""One line a step, for people who watch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from t1_agent.train.rundir import RunDir

PPO_COLUMNS = (
    "rollout/return_mean",
    "rollout/solved_rate",
    "train/explained_variance",
    "train/approx_kl",
    "train/entropy",
    "mismatch/mean_abs_delta_logp",
    "time/collect_s",
    "time/update_s",
)


def progress_line(head: str, metrics: dict[str, float], columns: Sequence[str]) -> str:
    """``head: name value  name value ...`` for the columns that were measured, without their groups."""
    shown = (f"{name.rpartition('/')[2]} {metrics[name]:.4g}" for name in columns if name in metrics)
    return f"{head}: " + "  ".join(shown)


def reporter(run: RunDir, say: Callable[[str], None], phase: str, *, every: int) -> Callable[[int, int, dict[str, float]], None]:
    """Logs every step of a warm start under ``<phase>/progress`` and says every ``every``-th and the last."""

    def report(step: int, steps: int, metrics: dict[str, float]) -> None:
        run.log(f"{phase}/progress", step, metrics)
        if step % every == 0 or step == steps:
            say(progress_line(f"{phase} warm start {step}/{steps}", metrics, tuple(metrics)))

    return report
