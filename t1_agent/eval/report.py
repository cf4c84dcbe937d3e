"""``runs/<name>/report/index.html``: one self-contained page about a run. No server, no network, everything from a task is escaped."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from t1_agent.eval.results import EvalResult, compare, summarise
from t1_agent.eval.statistics import Interval
from t1_agent.rollout.store import load_trajectories
from t1_agent.train.rundir import read_metrics, write_atomically
from t1_agent.types import Trajectory

TAG_ORDER = ("untrained", "warmstart", "ppo")
"""Order of the columns; other tags follow in alphabetical order."""

MAX_TRANSCRIPTS_PER_TAG = 40


@dataclass(frozen=True, slots=True)
class _Plot:
    caption: str
    data: str


def write_report(run_dir: Path) -> Path:
    """Build the report of a run from what the run wrote.

    Reads ``config.json``, ``metrics.jsonl``, ``eval/<tag>.json``, ``eval/<tag>.parquet`` and ``mismatch.json``; a file that is missing
    leaves its section out, so that a run can be looked at while it is going on.

    Args:
        run_dir: Directory of the run.

    Returns:
        Path of the page written.

    Raises:
        FileNotFoundError: If ``run_dir`` is not the directory of a run.
    """
    import jinja2

    config_path = run_dir / "config.json"
    if not config_path.is_file():
        raise FileNotFoundError(f"{run_dir} is not the directory of a run: it has no config.json")
    config = json.loads(config_path.read_text(encoding="utf-8"))
    metrics = read_metrics(run_dir / "metrics.jsonl")
    evaluations = load_evaluations(run_dir / "eval")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")), autoescape=True, undefined=jinja2.StrictUndefined
    )
    transcripts = _transcripts(run_dir / "eval", evaluations)
    page = environment.get_template("report.html.j2").render(
        title=f"{run_dir.name}",
        subtitle=_subtitle(config),
        tiles=_tiles(evaluations, metrics),
        tags=list(evaluations),
        result_rows=_result_rows(evaluations),
        differences=_differences(evaluations),
        plots=_plots(metrics),
        mismatch=_read_json(run_dir / "mismatch.json"),
        drift_rows=_drift_rows(metrics),
        costs=_cost_rows(metrics),
        transcripts=transcripts,
        transcript_tags=sorted({t["tag"] for t in transcripts}, key=_tag_key),
        transcript_groups=sorted({t["group"] for t in transcripts}),
        provenance=sorted((key, json.dumps(value)) for key, value in _flatten(config).items()),
    )
    path = run_dir / "report" / "index.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page)
    return path


def load_evaluations(folder: Path) -> dict[str, EvalResult]:
    """Tag -> evaluation, in the order of training."""
    results = [EvalResult.load(path) for path in folder.glob("*.json")] if folder.is_dir() else []
    return {result.tag: result for result in sorted(results, key=lambda result: _tag_key(result.tag))}


def _tag_key(tag: str) -> tuple[int, str]:
    return (TAG_ORDER.index(tag) if tag in TAG_ORDER else len(TAG_ORDER), tag)


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            flat.update(_flatten(item, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = item
    return flat


def _subtitle(config: Mapping[str, Any]) -> str:
    return f"Mixture-of-Experts actor-critic on T1Terminal-v0, seed {config.get('seed', '?')}."


# ------------------------------------------------------------------------------------------------------------------- tables
def _tiles(evaluations: Mapping[str, EvalResult], metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    tiles = []
    for tag, result in evaluations.items():
        rows = summarise(result)
        row = rows[-1]
        tiles.append(
            {
                "label": f"solved, {tag}",
                "value": f"{100 * row.solved.mean:.1f}%",
                "detail": f"{row.group}, {row.solved.n} episodes",
            }
        )
    if "warmstart" in evaluations and "ppo" in evaluations:
        difference = compare(evaluations["warmstart"], evaluations["ppo"])
        tiles.append(
            {
                "label": "PPO over warm start",
                "value": f"{100 * difference.mean:+.1f} points",
                "detail": f"95%: {100 * difference.low:+.1f} to {100 * difference.high:+.1f}, paired",
            }
        )
    drift = [row["tito/drift_tokens_in_loss"] for row in metrics if row["phase"] == "ppo" and "tito/drift_tokens_in_loss" in row]
    if drift:
        tiles.append({"label": "drift tokens in the loss", "value": f"{int(sum(drift))}", "detail": f"over {len(drift)} batches"})
    return tiles


def _result_rows(evaluations: Mapping[str, EvalResult]) -> list[dict[str, Any]]:
    summaries = {tag: {row.group: row for row in summarise(result)} for tag, result in evaluations.items()}
    groups = list(dict.fromkeys(group for rows in summaries.values() for group in rows))
    return [
        {
            "group": group,
            "n": max(rows[group].solved.n for rows in summaries.values() if group in rows),
            "solved": [rows[group].solved if group in rows else None for rows in summaries.values()],
            "verifiers": [rows[group].verifiers if group in rows else None for rows in summaries.values()],
        }
        for group in groups
    ]


def _differences(evaluations: Mapping[str, EvalResult]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    tags = list(evaluations)
    for before, after in pairwise(tags):
        for held_out, label in ((False, "held-out instances"), (True, "held-out family")):
            interval = _compare_or_none(evaluations[before], evaluations[after], held_out)
            if interval is not None:
                rows.append({"label": f"{label}: {after} minus {before}", "interval": interval})
    return rows


def _compare_or_none(before: EvalResult, after: EvalResult, held_out: bool) -> Interval | None:
    try:
        return compare(before, after, held_out_families=held_out)
    except ValueError:  # the two evaluations share no task of that kind
        return None


def _drift_rows(metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Drift in the loss region of every evaluation's episodes, with the ledger and with the re-tokenising baseline."""
    return [
        {
            "tag": line["phase"].removeprefix("eval/"),
            "sampled": int(line["rollout/sampled_tokens"]),
            "ledger": int(line["tito/drift_tokens_in_loss"]),
            "baseline": int(line["tito/baseline_drift_tokens"]),
        }
        for line in metrics
        if line["phase"].startswith("eval/") and "tito/baseline_drift_tokens" in line
    ]


_COST_KEYS = ("episodes", "turns", "sampled_tokens", "trained_tokens", "sandbox_seconds")


def _cost_rows(metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Wall time, episodes and tokens by phase, summed over the lines of ``metrics.jsonl``, and their total."""
    phases: dict[str, dict[str, float]] = {}
    for line in metrics:
        phase = _PHASE_NAMES.get(line["phase"], line["phase"])
        if phase.endswith("/progress"):
            continue
        row = phases.setdefault(phase, dict.fromkeys(("wall", *_COST_KEYS), 0.0))
        row["wall"] += sum(line.get(key) or 0.0 for key in ("time/seconds", "time/collect_s", "time/update_s"))
        row["episodes"] += line.get("rollout/episodes") or 0.0
        row["turns"] += line.get("rollout/turns") or 0.0
        row["sampled_tokens"] += line.get("rollout/sampled_tokens") or 0.0
        row["trained_tokens"] += line.get("batch/sampled_tokens") or line.get("warmstart/trained_tokens") or 0.0
        row["sandbox_seconds"] += line.get("rollout/sandbox_s") or 0.0
    if not phases:
        return []
    phases["total"] = {key: sum(row[key] for row in phases.values()) for key in ("wall", *_COST_KEYS)}
    return [
        {"phase": phase, "wall": _duration(row["wall"]), **{key: f"{row[key]:,.0f}" if row[key] else "-" for key in _COST_KEYS}}
        for phase, row in phases.items()
    ]


_PHASE_NAMES = {"actor": "actor warm start", "critic": "critic warm start", "ppo": "PPO"}


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 90 else f"{int(seconds // 60)} min {int(seconds % 60):02d} s"


# -------------------------------------------------------------------------------------------------------------------- plots
_CURVES: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    ("actor/progress", "Actor warm start: cross-entropy on demonstrated tokens", (("warmstart/loss", "loss"),)),
    ("critic/progress", "Critic warm start: explained variance of returns", (("critic/explained_variance", "explained variance"),)),
    ("ppo", "Training episodes: solved rate", (("rollout/solved_rate", "solved"),)),
    ("ppo", "Training episodes: share of verifiers that pass", (("rollout/verifiers_fraction", "verifiers"),)),
    ("ppo", "Policy: entropy a token", (("train/entropy", "entropy"),)),
    ("ppo", "Policy: approximate KL and clip fraction", (("train/approx_kl", "KL"), ("train/clip_fraction", "clip fraction"))),
    ("ppo", "Critic: explained variance", (("train/explained_variance", "explained variance"),)),
    ("ppo", "Routes that would have differed without replay", (("routing/train/live_disagreement", "share of (token, layer) choices"),)),
)


def _plots(metrics: Sequence[Mapping[str, Any]]) -> list[_Plot]:
    plots = []
    for phase, caption, series in _CURVES:
        lines = []
        for key, label in series:
            points = [(row["step"], row[key]) for row in metrics if row.get("phase") == phase and row.get(key) is not None]
            if points:
                lines.append((label, points))
        if lines:
            plots.append(_Plot(caption, _line_plot(lines)))
    return plots


def _line_plot(lines: Sequence[tuple[str, Sequence[tuple[float, float]]]]) -> str:
    """SVG of one small line plot, base64. Drawn with the object API: no global state, no display."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(4.6, 2.7), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    for label, points in lines:
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            label=label,
            linewidth=1.6,
            marker="o" if len(points) < 25 else None,
            markersize=3,
        )
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(lines) > 1:
        axes.legend(frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return base64.b64encode(buffer.getvalue()).decode()


# -------------------------------------------------------------------------------------------------------------- transcripts
def _transcripts(folder: Path, evaluations: Mapping[str, EvalResult]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for tag, result in evaluations.items():
        path = folder / f"{tag}.parquet"
        if not path.is_file():
            continue
        groups = {episode.task_id: episode.group for episode in result.episodes}
        kept = [t for t in load_trajectories(path) if not t.infra_failure]
        # Spread over the set, so that every family is seen.
        stride = max(1, len(kept) // MAX_TRANSCRIPTS_PER_TAG)
        rows.extend(_transcript(tag, groups.get(t.task_id, ""), t) for t in kept[::stride][:MAX_TRANSCRIPTS_PER_TAG])
    return rows


def _transcript(tag: str, group: str, trajectory: Trajectory) -> dict[str, Any]:
    return {
        "tag": tag,
        "group": group,
        "task_id": trajectory.task_id,
        "solved": trajectory.solved,
        "passed": trajectory.verifiers_passed,
        "total": trajectory.verifiers_total,
        "end_reason": trajectory.end_reason,
        "instruction": trajectory.metadata.get("instruction", ""),
        "turns": trajectory.turns,
    }
