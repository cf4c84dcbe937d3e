"""The whole road in miniature, in real sandboxes: it runs, it reports, a killed run goes on to the same end, nothing is overwritten."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the agent extra: pip install 't1-terminal[agent]'")

from t1_agent.eval.results import EvalResult
from t1_agent.rollout.store import load_trajectories
from t1_agent.tito import verify_digests
from t1_env.sandbox.local import unavailable_reason

pytestmark = [
    pytest.mark.namespaces,
    pytest.mark.slow,
    pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason())),
]

RECIPE = """
name = "mini"
tensorboard = false

[tasks]
train = ["families/tidy-files?level=1", "seeds/hello-file"]
held_out = ["families/hand-over?level=1"]

[model]
hidden = 32
layers = 2
experts = 4
moe_intermediate = 32
heads = 2
kv_heads = 1

[demos]
episodes = 8

[warmstart]
actor_steps = 6
critic_episodes = 6
critic_max_epochs = 2

[rollout]
episodes = 6
max_turns = 3
max_turn_tokens = 12
max_context_tokens = 384
concurrency = 8
env_threads = 4

[ppo]
iterations = 2

[eval]
instances = 4
held_out_instances = 2
mismatch_episodes = 3
untrained = false
"""


def command(folder: Path, *extra: str) -> list[str]:
    recipe = folder / "mini.toml"
    recipe.write_text(RECIPE)
    return [sys.executable, "-m", "t1_agent", "train", f"@{recipe}", *extra]


def train(folder: Path, *extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(folder, *extra), cwd=folder, capture_output=True, text=True, timeout=280, check=False, env=environment())


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb"}


def metrics(run: Path) -> list[dict[str, Any]]:
    """Lines of the metrics without what a clock decides."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("time/") and not key.endswith("sandbox_s")} for row in rows]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("road")
    done = train(folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("report/index.html")
    return folder / "runs" / "mini"


def test_a_run_leaves_what_the_docs_promise(finished: Path) -> None:
    config = json.loads((finished / "config.json").read_text())
    assert config["model"]["experts"] == 4
    for tag in ("warmstart", "ppo"):
        result = EvalResult.load(finished / "eval" / f"{tag}.json")
        assert len(result.episodes) + result.infra_failures == 6
        assert result.infra_failures == 0
    page = (finished / "report" / "index.html").read_text()
    assert "Learning curves" in page
    assert "http" not in page.replace("http://www.w3.org", ""), "the page must not reach for the network"
    assert page.count('class="episode"') == 12


def test_what_is_trained_on_is_what_was_sampled(finished: Path) -> None:
    stored = sorted((finished / "rollouts").glob("iteration-*.parquet"))
    assert len(stored) == 2
    for path in stored:
        for trajectory in load_trajectories(path):
            verify_digests(trajectory)
            assert trajectory.metadata["drift_tokens_in_loss"] == 0
            assert trajectory.routes_valid is not None
            # The last token of an episode is never read by the sampler; every other row was recorded.
            assert trajectory.routes_valid[: int(trajectory.loss_mask.nonzero()[0].max())].all()


def test_batches_report_no_drift_and_routes_as_recorded(finished: Path) -> None:
    ppo = [row for row in metrics(finished) if row["phase"] == "ppo"]
    assert len(ppo) == 2
    for row in ppo:
        assert row["tito/drift_tokens_in_loss"] == 0
        assert row["routing/rows_not_as_recorded"] == 0
        assert row["mismatch/non_finite"] == 0


def test_the_same_episodes_would_drift_if_they_were_tokenised_again(finished: Path) -> None:
    rows = [row for row in metrics(finished) if row["phase"].startswith("eval/")]
    assert [row["tito/drift_tokens_in_loss"] for row in rows] == [0, 0]
    assert all(row["tito/baseline_drift_tokens"] > 0 for row in rows)


def test_mismatch_falls_with_replay_when_precision_differs(finished: Path) -> None:
    table = json.loads((finished / "mismatch.json").read_text())
    rows = {(row["tito"], row["r3"]): row for row in table["rows"]}
    assert set(rows) == {("on", "on"), ("on", "off"), ("off", "on"), ("off", "off")}
    assert rows["on", "on"]["drift_tokens"] == 0
    # An untrained policy samples ids in ways no tokenizer would write them.
    assert rows["off", "off"]["drift_tokens"] > 0
    assert rows["on", "on"]["mean_abs"] <= rows["on", "off"]["mean_abs"]


def test_a_run_is_never_overwritten(finished: Path) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in finished.rglob("*"))
    done = train(finished.parent.parent)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "--resume" in done.stderr
    assert sorted((path, path.stat().st_mtime_ns) for path in finished.rglob("*")) == before


def test_a_changed_configuration_is_not_resumed(finished: Path) -> None:
    done = train(finished.parent.parent, "--resume", "--ppo.clip_low", "0.1")
    assert done.returncode == 2
    assert "ppo.clip_low" in done.stderr


@pytest.mark.parametrize("after", ["actor", "iteration"])
def test_a_killed_run_goes_on_to_the_same_end(finished: Path, tmp_path: Path, after: str) -> None:
    process = subprocess.Popen(command(tmp_path), cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment())
    checkpoints = tmp_path / "runs" / "mini" / "checkpoints"
    deadline = time.monotonic() + 200
    while not any(path.name.endswith(after) for path in (checkpoints.iterdir() if checkpoints.is_dir() else ())):
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = train(tmp_path, "--resume")
    assert done.returncode == 0, done.stderr
    assert metrics(tmp_path / "runs" / "mini") == metrics(finished)
    for tag in ("warmstart", "ppo"):
        ours, theirs = (EvalResult.load(run / "eval" / f"{tag}.json") for run in (tmp_path / "runs" / "mini", finished))
        strip = [(e.task_id, e.verifiers_passed, e.turns, e.sampled_tokens, e.end_reason) for e in ours.episodes]
        assert strip == [(e.task_id, e.verifiers_passed, e.turns, e.sampled_tokens, e.end_reason) for e in theirs.episodes]


def test_evaluate_and_report_again(finished: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "t1_agent", "eval", str(finished), "--tag", "again", "--instances", "2"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    assert len(EvalResult.load(finished / "eval" / "again.json").episodes) == 4
    assert "again" in (finished / "report" / "index.html").read_text()
