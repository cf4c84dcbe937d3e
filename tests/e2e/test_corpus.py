"""The corpus, played in real sandboxes: oracles pass everything, doing nothing passes nothing, every slip costs something."""

import pytest

from t1_env.tasks import list_tasks, load_task
from t1_env.tasks.check import check_task


@pytest.fixture(autouse=True)
def _sandbox(tmp_path_factory, monkeypatch):
    from t1_env.sandbox.local import unavailable_reason

    if reason := unavailable_reason():
        pytest.skip(reason)
    monkeypatch.setenv("T1_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


IDS = list_tasks()
SEEDS = [task_id for task_id in IDS if task_id.startswith("seeds/")]
LEVELS = [task_id for task_id in IDS if task_id.startswith("families/")]


@pytest.mark.namespaces
@pytest.mark.parametrize("task_id", SEEDS)
def test_hand_written_tasks(task_id):
    found = check_task(load_task(task_id), slips=True)
    assert found.problems == ()
    assert found.n_slips >= 3


@pytest.mark.namespaces
@pytest.mark.parametrize("task_id", LEVELS)
def test_family_instances(task_id):
    easiest = task_id.endswith("level=1")
    for seed in (0, 2_000_000) if easiest else (0,):
        assert check_task(load_task(f"{task_id}&seed={seed}"), slips=easiest).problems == ()
