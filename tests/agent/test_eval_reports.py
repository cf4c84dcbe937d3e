"""Results, comparisons over seeds and the report page, from files written by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("pyarrow", reason="needs the agent extra: pip install 't1-terminal[agent]'")
pytest.importorskip("matplotlib", reason="needs the agent extra: pip install 't1-terminal[agent]'")

from t1_agent.eval.report import write_report
from t1_agent.eval.results import EpisodeResult, EvalResult, compare, evaluate_trajectories, summarise
from t1_agent.eval.seeds import as_markdown, combine_runs
from t1_agent.rollout.store import save_trajectories
from t1_agent.testing import toy_trajectory
from t1_agent.train.rundir import read_metrics
from t1_agent.types import Turn
from t1_env.errors import ConfigError


def episode(index: int, solved: bool, group: str = "tidy-files") -> EpisodeResult:
    return EpisodeResult(f"families/{group}?seed={index}", group, solved, 4 if solved else 1, 4, 5, 50, "submitted", 0.2)


def make_run(root: Path, seed: int, before: list[bool], after: list[bool]) -> Path:
    run = root / f"run-{seed}"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"seed": seed, "name": run.name, "ppo": {"clip_low": 0.2}}))
    for tag, solved in (("warmstart", before), ("ppo", after)):
        episodes = [episode(i, value) for i, value in enumerate(solved)]
        episodes += [episode(100 + i, False, "held-out: hand-over") for i in range(3)]
        EvalResult(tag, tuple(episodes), 0, 1.0).save(run / "eval" / f"{tag}.json")
    return run


def test_results_survive_the_disk_and_another_version_is_refused(tmp_path: Path) -> None:
    result = EvalResult("ppo", (episode(0, True), episode(1, False)), 2, 3.5)
    result.save(tmp_path / "deep" / "ppo.json")
    assert EvalResult.load(tmp_path / "deep" / "ppo.json") == result
    (tmp_path / "old.json").write_text('{"version": 0}')
    with pytest.raises(ValueError, match="version 0"):
        EvalResult.load(tmp_path / "old.json")


def test_infra_failures_are_in_neither_numerator_nor_denominator() -> None:
    good = toy_trajectory([("prompt", -1, [1]), ("sampled", 0, [2, 3])], [1.0])
    broken = toy_trajectory([("prompt", -1, [1]), ("sampled", 0, [2])], [0.0], end_reason="infra_failure")
    result = evaluate_trajectories("x", [good, broken], ["a", "a"], 1.0)
    assert len(result.episodes) == 1
    assert result.infra_failures == 1
    assert summarise(result)[0].solved.mean == 1.0
    with pytest.raises(ValueError, match="2 episodes for 1 tasks"):
        evaluate_trajectories("x", [good, broken], ["a"], 1.0)


def test_held_out_families_are_compared_apart(tmp_path: Path) -> None:
    run = make_run(tmp_path, 0, [False] * 40, [True] * 40)
    before, after = (EvalResult.load(run / "eval" / f"{tag}.json") for tag in ("warmstart", "ppo"))
    assert compare(before, after).mean == 1.0
    assert compare(before, after, held_out_families=True).mean == 0.0
    only = EvalResult("other", (episode(999, True),), 0, 1.0)
    with pytest.raises(ValueError, match="share no task"):
        compare(before, only)


def test_seeds_are_combined_over_tasks_and_runs(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, seed, [False] * 30 + [True] * 10, [True] * 30 + [False] * 10) for seed in (1, 2, 3)]
    result = combine_runs(runs)
    assert result.seeds == (1, 2, 3)
    row = result.rows[0]
    assert row["n_tasks"] == 40
    assert row["before"].mean == pytest.approx(0.25)
    assert row["difference"].mean == pytest.approx(0.5)
    assert row["difference"].excludes_zero
    text = as_markdown(result)
    assert "+50.0" in text
    assert "held-out: hand-over" in text
    json.dumps(result.as_dict())


def test_runs_that_cannot_be_combined_are_refused(tmp_path: Path) -> None:
    first = make_run(tmp_path, 1, [True], [True])
    (tmp_path / "b").mkdir()
    other = make_run(tmp_path / "b", 1, [True], [True])
    with pytest.raises(ConfigError, match="different seed"):
        combine_runs([first, other])
    (first / "eval" / "ppo.json").unlink()
    with pytest.raises(ConfigError, match="no evaluation 'ppo'"):
        combine_runs([first])
    with pytest.raises(ConfigError, match=r"config\.json"):
        combine_runs([tmp_path / "nowhere"])


def test_the_page_escapes_what_a_terminal_printed(tmp_path: Path) -> None:
    run = make_run(tmp_path, 7, [True], [True])
    hostile = "<script>alert(1)</script><img src=x onerror=y>"
    trajectory = toy_trajectory([("prompt", -1, [1]), ("sampled", 0, [2, 3])], [1.0], task_id="families/tidy-files?seed=0")
    turns = (Turn(hostile, hostile, hostile, 1.0, 1),)
    trajectory = replace(trajectory, turns=turns, metadata={**trajectory.metadata, "instruction": hostile})
    save_trajectories(run / "eval" / "ppo.parquet", [trajectory])
    (run / "metrics.jsonl").write_text(
        json.dumps({"phase": "ppo", "step": 1, "rollout/solved_rate": 0.5, "tito/drift_tokens_in_loss": 0.0, "time/collect_s": 100.0})
        + "\n"
        + json.dumps({"phase": "ppo", "step": 2, "rollout/solved_rate": None, "rollout/episodes": 12})
        + '\n{"phase": "ppo", "st'
    )
    assert len(read_metrics(run / "metrics.jsonl")) == 2
    page = write_report(run).read_text()
    assert hostile not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "1 min 40 s" in page
    assert page.count("<script>") == 1


def test_a_report_of_a_run_that_has_just_begun(tmp_path: Path) -> None:
    run = tmp_path / "new"
    run.mkdir()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        write_report(run)
    (run / "config.json").write_text('{"seed": 3}')
    assert "No transcripts were kept" in write_report(run).read_text()
