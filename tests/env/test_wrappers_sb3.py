"""The Stable-Baselines3 script in miniature: it trains, writes its curve, and never overwrites one."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from t1_env.integrations import sb3
from t1_env.sandbox.local import unavailable_reason

pytest.importorskip("stable_baselines3", reason="stable-baselines3 is not installed")
pytestmark = [pytest.mark.namespaces, pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))]


def test_a_short_training_writes_its_results_and_keeps_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "runs" / "one"
    assert sb3.main(["--timesteps", "40", "--seed", "1", "--out", str(out)]) == 0
    summary = json.loads((out / "summary.json").read_text())
    rows = list(csv.DictReader((out / "curve.csv").read_text().splitlines()))
    assert summary["episodes"] == len(rows) > 0
    assert summary["verifiers_total"] == 3
    assert "echo hi > hello.txt" in summary["menu"]
    assert all(0 <= float(row["return"]) <= 3 and 1 <= int(row["length"]) <= 8 for row in rows)
    assert all((float(row["return"]) == 3.0) == (row["solved"] == "1") for row in rows)
    before = (out / "summary.json").read_bytes()
    capsys.readouterr()
    assert sb3.main(["--timesteps", "40", "--out", str(out)]) == 2
    assert "never overwritten" in capsys.readouterr().err
    assert (out / "summary.json").read_bytes() == before


def test_unnamed_runs_get_a_directory_of_their_own(tmp_path: Path) -> None:
    assert sb3.free_directory(tmp_path / "runs").name == "sb3-000"
    (tmp_path / "runs" / "sb3-000").mkdir(parents=True)
    assert sb3.free_directory(tmp_path / "runs").name == "sb3-001"


def test_the_menu_is_a_shuffle_that_follows_the_seed() -> None:
    first = sb3.build_menu("seeds/hello-file", 3)
    assert first == sb3.build_menu("seeds/hello-file", 3)
    assert sorted(first) == sorted([*sb3.DISTRACTORS, "echo hi > hello.txt"])
    assert any(sb3.build_menu("seeds/hello-file", seed) != first for seed in range(4, 8))
