"""Batches: exact round trips, planning, screening, drift."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from t1_agent.testing import toy_trajectory  # noqa: E402
from t1_agent.tito.errors import LedgerError  # noqa: E402
from t1_agent.train.batch import (  # noqa: E402
    BatchError,
    build_batch,
    check_drift,
    drift_tokens,
    plan_micro_batches,
    screen,
    split_minibatches,
    unpad,
)


def random_trajectory(rng, *, routes=False, turns=2, end_reason="submitted"):
    segments = [("prompt", -1, rng.integers(0, 50, rng.integers(1, 9)))]
    for turn in range(turns):
        segments.append(("sampled", turn, rng.integers(0, 50, rng.integers(1, 6))))
        segments.append(("env_content", turn, rng.integers(0, 50, rng.integers(1, 12))))
    length = sum(len(ids) for _, _, ids in segments)
    sampled = sum(len(ids) for kind, _, ids in segments if kind == "sampled")
    recorded = rng.permuted(np.tile(np.arange(8), (length, 3, 1)), axis=-1)[..., :2].astype(np.uint8) if routes else None
    return toy_trajectory(segments, [1.0] * turns, logprobs=-rng.random(sampled).astype(np.float32), routes=recorded, end_reason=end_reason)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), n_episodes=st.integers(1, 7), routes=st.booleans(), budget=st.integers(1, 200))
def test_round_trip_is_exact(seed, n_episodes, routes, budget):
    rng = np.random.default_rng(seed)
    episodes = [random_trajectory(rng, routes=routes) for _ in range(n_episodes)]
    plans = plan_micro_batches([len(t.token_ids) for t in episodes], range(n_episodes), budget)
    assert sorted(index for plan in plans for index in plan) == list(range(n_episodes))
    for plan in plans:
        batch = build_batch(episodes, plan)
        assert drift_tokens(batch, episodes) == 0
        for index, row in zip(plan, unpad(batch), strict=True):
            episode = episodes[index]
            for name in ("token_ids", "loss_mask", "logprobs"):
                np.testing.assert_array_equal(row[name], getattr(episode, name), err_msg=name)
            if routes:
                np.testing.assert_array_equal(row["routes"], episode.routes)
                np.testing.assert_array_equal(row["routes_valid"], episode.routes_valid)


def test_state_index_is_one_before_the_action_in_its_own_row():
    a = toy_trajectory([("prompt", -1, [10, 11]), ("sampled", 0, [12, 13]), ("env_content", 0, [14])], [1.0])
    b = toy_trajectory([("prompt", -1, [20]), ("sampled", 0, [21])], [1.0])
    batch = build_batch([a, b], [1, 0])
    flat = batch.input_ids.reshape(-1)
    assert flat[batch.state_index].tolist() == [20, 11, 12]
    assert batch.action_ids.tolist() == [21, 12, 13]
    assert batch.counts.tolist() == [1, 2]
    assert batch.padding_share == pytest.approx(3 / 10)
    assert [part.tolist() for part in batch.split(torch.arange(3))] == [[0], [1, 2]]
    with pytest.raises(ValueError, match=r"split: got length 2, expected 3"):
        batch.split(torch.arange(2))


def test_plan_keeps_the_budget_and_wastes_little():
    rng = np.random.default_rng(0)
    lengths = rng.integers(150, 650, 128).tolist()
    plans = plan_micro_batches(lengths, range(128), 4096)
    padded = [max(lengths[i] for i in plan) * len(plan) for plan in plans]
    assert all(size <= 4096 for size in padded)
    assert 1 - sum(lengths) / sum(padded) < 0.05
    assert plan_micro_batches([9, 5000], [0, 1], 100) == [[1], [0]]  # an episode over the budget stands alone


def test_minibatches_cover_every_episode_once_and_are_never_empty():
    rng = np.random.default_rng(0)
    parts = split_minibatches(10, 4, rng)
    assert sorted(itertools.chain.from_iterable(parts)) == list(range(10))
    assert [len(part) for part in parts] == [3, 3, 2, 2]
    assert len(split_minibatches(3, 8, rng)) == 3
    assert split_minibatches(10, 1, rng)[0] != list(range(10))


def test_screen_drops_infra_failures_and_empty_episodes():
    rng = np.random.default_rng(1)
    good = random_trajectory(rng)
    broken = random_trajectory(rng, end_reason="infra_failure")
    empty = toy_trajectory([("prompt", -1, [1, 2])], [], end_reason="context_limit")
    result = screen([broken, good, empty])
    assert result.kept == (good,)
    assert (result.infra_failures, result.empty) == (1, 1)
    assert result.metrics()["batch/episodes"] == 1
    assert result.metrics()["batch/tokens"] == len(good.token_ids)


def test_screen_does_not_even_look_at_what_the_machinery_broke():
    broken = dataclasses.replace(random_trajectory(np.random.default_rng(1), end_reason="infra_failure"), segment_digests=())
    assert screen([broken]).infra_failures == 1


def test_edited_ids_are_refused():
    episode = random_trajectory(np.random.default_rng(2))
    ids = episode.token_ids.copy()
    ids[np.flatnonzero(episode.loss_mask)[0]] += 1
    with pytest.raises(LedgerError, match="not those that were recorded"):
        screen([dataclasses.replace(episode, token_ids=ids)])
    with pytest.raises(LedgerError, match="digests"):
        screen([dataclasses.replace(episode, segment_digests=(), segment_ends=None)])


def test_drift_is_counted_in_the_batch_itself():
    rng = np.random.default_rng(3)
    episodes = [random_trajectory(rng, turns=1) for _ in range(2)]
    batch = build_batch(episodes, [0, 1])
    n_sampled = int(episodes[1].loss_mask.sum())
    first = int(np.flatnonzero(episodes[1].loss_mask)[0])
    batch.input_ids[1, first] += 1
    assert drift_tokens(batch, episodes) == n_sampled
    with pytest.raises(BatchError, match="refusing to train"):
        check_drift(batch, episodes)
    widened = build_batch(episodes, [0, 1])
    widened.loss_mask[0, 0] = True  # a prompt token slipped into the loss
    assert drift_tokens(widened, episodes) >= 1


def test_mixed_routes_and_misfits_raise():
    rng = np.random.default_rng(4)
    with pytest.raises(BatchError, match="all or none"):
        build_batch([random_trajectory(rng, routes=True), random_trajectory(rng)], [0, 1])
    with pytest.raises(BatchError, match="no episodes"):
        build_batch([], [])
    other = random_trajectory(rng, routes=True)
    assert other.routes is not None
    narrower = dataclasses.replace(other, routes=other.routes[:, :2])
    with pytest.raises(BatchError, match="shape"):
        build_batch([random_trajectory(rng, routes=True), narrower], [0, 1])
    starts_sampled = toy_trajectory([("sampled", 0, [1, 2])], [1.0])
    with pytest.raises(ValueError, match="position 0"):
        build_batch([starts_sampled], [0])


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 900), min_size=1, max_size=40), budget=st.integers(1, 4096), threads=st.integers(1, 4))
def test_plans_for_threads_are_complete_within_budget_and_as_many_as_can_run(lengths, budget, threads):
    plans = plan_micro_batches(lengths, range(len(lengths)), budget, threads=threads)
    assert sorted(itertools.chain.from_iterable(plans)) == list(range(len(lengths)))
    for plan in plans:
        assert len(plan) == 1 or max(lengths[i] for i in plan) * len(plan) <= budget
    alone = plan_micro_batches(lengths, range(len(lengths)), budget)
    assert len(alone) <= len(plans) <= max(len(alone) + threads - 1, len(alone))


def test_a_small_batch_is_shared_between_threads():
    plans = plan_micro_batches([100] * 16, range(16), 100_000, threads=2)
    assert [len(plan) for plan in plans] == [8, 8]
