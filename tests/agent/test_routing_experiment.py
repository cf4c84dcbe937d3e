"""The R3 experiment runs end to end, and its smallest run already shows what R3 is for."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

from t1_agent.routing import experiment  # noqa: E402

pytestmark = pytest.mark.torch


def test_smallest_run(tmp_path, capsys):
    threads = torch.get_num_threads()
    out = tmp_path / "r3.json"
    try:
        assert experiment.main(["--seeds", "1", "--sequences", "6", "--steps", "2", "--repeats", "1", "--out", str(out)]) == 0
    finally:
        torch.set_num_threads(threads)
    report = json.loads(out.read_text())
    assert {"recording_overhead", "replay_overhead"} <= report["overheads"].keys()
    found = {(r["model"], r["sampler"], r["trainer"], r["r3"]): r for r in report["results"]}
    assert len(found) == 16
    assert all(r["non_finite"] == 0 and r["tokens"] > 0 for r in found.values())
    same = found["random", "fp32", "fp32", False]
    assert same["disagreement"] == 0.0
    assert same["max_abs_delta_logp"] < 1e-4
    off, on = found["random", "bf16", "fp32", False], found["random", "bf16", "fp32", True]
    assert off["disagreement"] > 0
    assert on["mean_abs_delta_logp"] < off["mean_abs_delta_logp"]
    assert on["max_abs_delta_logp"] < off["max_abs_delta_logp"]
    printed = capsys.readouterr().out
    assert printed.count("\n| ") >= 16


def test_results_are_not_overwritten(tmp_path, capsys):
    out = tmp_path / "r3.json"
    out.write_text("{}")
    with pytest.raises(SystemExit) as stop:
        experiment.main(["--out", str(out)])
    assert stop.value.code == 2
    assert "already exists" in capsys.readouterr().err
    assert out.read_text() == "{}"
