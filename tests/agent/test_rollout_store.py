"""Episodes survive the disk bit for bit."""

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from t1_agent.rollout.store import load_trajectories, save_trajectories
from t1_agent.types import Trajectory, Turn

pytest.importorskip("pyarrow", reason="needs the agent extra: pip install 't1-terminal[agent]'")


def make_trajectory(*, routes: bool, n_experts_dtype: type = np.uint8) -> Trajectory:
    rng = np.random.default_rng(0)
    mask = np.array([False, False, True, True, False, True])
    logprobs = np.where(mask, rng.normal(size=6), 0.0).astype(np.float32)
    return Trajectory(
        task_id="families/x?level=1&seed=3",
        token_ids=np.arange(6, dtype=np.int32),
        loss_mask=mask,
        logprobs=logprobs,
        turn_index=np.array([-1, -1, 0, 0, 0, 1], dtype=np.int32),
        rewards=np.array([1.0, -0.0], dtype=np.float32),
        terminated=True,
        truncated=False,
        end_reason="submitted",
        verifiers_passed=1,
        verifiers_total=3,
        routes=rng.integers(0, 8, size=(6, 4, 2)).astype(n_experts_dtype) if routes else None,
        routes_valid=np.array([True] * 5 + [False]) if routes else None,
        weight_versions=np.where(mask, 7, -1).astype(np.int32),
        segment_digests=("aa", "bb"),
        segment_ends=np.array([2, 6], dtype=np.int32),
        repairs={"BOUNDARY": 1},
        turns=(Turn("ls", "ls", "a\u0000b \ud7ff\u2028", 1.0, 1, 0, 0.1), Turn("x", None, "", 0.0, 1)),
        metadata={"family": "x", "nested": [1, None]},
    )


@pytest.mark.parametrize(("routes", "dtype"), [(True, np.uint8), (True, np.uint16), (False, np.uint8)])
def test_round_trip_is_exact(tmp_path: Path, routes: bool, dtype: type) -> None:
    before = make_trajectory(routes=routes, n_experts_dtype=dtype)
    save_trajectories(tmp_path / "deep" / "rollout.parquet", [before, before])
    loaded = load_trajectories(tmp_path / "deep" / "rollout.parquet")
    assert len(loaded) == 2
    for field in fields(Trajectory):
        got, expected = getattr(loaded[1], field.name), getattr(before, field.name)
        if isinstance(expected, np.ndarray):
            assert got.dtype == expected.dtype, field.name
            assert got.tobytes() == expected.tobytes(), field.name
        else:
            assert got == expected, field.name


def test_no_episodes_is_an_empty_file(tmp_path: Path) -> None:
    save_trajectories(tmp_path / "none.parquet", [])
    assert load_trajectories(tmp_path / "none.parquet") == []


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> object:
        yield make_trajectory(routes=False)
        raise RuntimeError("sampler died")

    with pytest.raises(RuntimeError):
        save_trajectories(tmp_path / "half.parquet", broken())  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_another_version_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    with pytest.raises(ValueError, match="store version none"):
        load_trajectories(tmp_path / "other.parquet")
