"""The learner: equal losses however the batch is cut, R3, refusals, and warm starts."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from t1_agent.config import OptimConfig, PPOConfig, WarmstartConfig  # noqa: E402
from t1_agent.models.actor_critic import ActorCritic  # noqa: E402
from t1_agent.models.critic import Critic  # noqa: E402
from t1_agent.models.tiny_moe import build_actor, tiny_moe_config  # noqa: E402
from t1_agent.testing import CopyGame, toy_trajectory  # noqa: E402
from t1_agent.train.batch import BatchError, build_batch  # noqa: E402
from t1_agent.train.experience import evaluate_actor, evaluate_critic, prepare_experience  # noqa: E402
from t1_agent.train.forward import actor_forward, clip_gradients, rows_that_matter  # noqa: E402
from t1_agent.train.learner import Learner, LearnerError  # noqa: E402
from t1_agent.train.replicas import Replicas, deal  # noqa: E402
from t1_agent.train.warmstart import bucketed_batches, learning_rate_factor, warmstart_actor, warmstart_critic  # noqa: E402

torch.set_num_threads(1)
GAME = CopyGame(symbols=3, turns=2)
LIVE = PPOConfig(replay_routes=False)


@pytest.fixture
def model():
    config = tiny_moe_config(20, hidden=32, layers=2, heads=2, kv_heads=1, experts=4, top_k=2, moe_intermediate=32, max_positions=128)
    actor = build_actor(config, 0)
    return ActorCritic(actor, Critic.from_actor(actor))


def ragged_episodes(n, seed=0, end_reason="submitted"):
    """Episodes of very different lengths."""
    rng = np.random.default_rng(seed)
    episodes = []
    for _ in range(n):
        segments = [("prompt", -1, rng.integers(0, 20, rng.integers(1, 20)))]
        for turn in range(int(rng.integers(1, 4))):
            segments.append(("sampled", turn, rng.integers(0, 20, rng.integers(1, 5))))
            segments.append(("env_content", turn, rng.integers(0, 20, rng.integers(1, 20))))
        turns = segments[-1][1] + 1
        episodes.append(toy_trajectory(segments, rng.integers(0, 3, turns).tolist(), end_reason=end_reason))
    return episodes


def sampled_by(model, episodes):
    """The same episodes with the model's own log-probs as the sampler's."""
    logprobs, _ = evaluate_actor(model.actor, episodes, max_tokens=1, temperature=1.0, replay=False)
    result = []
    for episode, own in zip(episodes, logprobs, strict=True):
        full = np.zeros(len(episode.token_ids), dtype=np.float32)
        full[episode.loss_mask] = own
        result.append(dataclasses.replace(episode, logprobs=full))
    return result


def one_step(model, episodes, optim, ppo=LIVE):
    """Weights after one update of a copy."""
    trained = copy.deepcopy(model)
    metrics = Learner(trained, ppo, optim).update(episodes, seed=0)
    return trained, metrics


def test_padded_micro_batched_and_accumulated_losses_are_one(model):
    episodes = sampled_by(model, ragged_episodes(9))
    base = {"epochs": 1, "critic_epochs": 1, "minibatches": 1, "critic_minibatches": 1}
    whole, whole_metrics = one_step(model, episodes, OptimConfig(**base, micro_batch_tokens=100_000))
    for budget in (1, 90, 200):  # one episode each; a few; more
        cut, cut_metrics = one_step(model, episodes, OptimConfig(**base, micro_batch_tokens=budget))
        for name in ("train/policy_loss", "train/value_loss", "train/entropy", "train/actor_grad_norm", "train/critic_grad_norm"):
            assert cut_metrics[name] == pytest.approx(whole_metrics[name], rel=1e-4, abs=1e-6), (budget, name)
        for (name, ours), theirs in zip(cut.named_parameters(), whole.parameters(), strict=True):
            # AdamW's first step is lr * sign-like: compare where the gradient is not rounding noise.
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-3, msg=f"{budget} {name}")
    assert whole_metrics["batch/padding_share"] > 0.2


def test_accumulated_gradient_is_the_gradient_of_the_token_mean(model):
    episodes = ragged_episodes(5)
    batch = build_batch(episodes, range(5))
    reference = -actor_forward(model.actor, batch).logprobs.mean()
    (expected,) = torch.autograd.grad(reference, [model.actor.model.norm.weight])
    total = batch.n_actions
    for index in range(5):
        (-actor_forward(model.actor, build_batch(episodes, [index])).logprobs.sum() / total).backward()
    torch.testing.assert_close(model.actor.model.norm.weight.grad, expected, atol=1e-6, rtol=1e-4)


def test_log_probs_do_not_depend_on_neighbours_or_padding(model):
    episodes = ragged_episodes(6)
    alone, _ = evaluate_actor(model.actor, episodes, max_tokens=1, temperature=1.0, replay=False)
    together, _ = evaluate_actor(model.actor, episodes, max_tokens=10_000, temperature=1.0, replay=False)
    for a, b in zip(alone, together, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    logits = model.actor(input_ids=torch.from_numpy(episodes[0].token_ids[None].astype(np.int64))).logits[0]
    positions = np.flatnonzero(episodes[0].loss_mask)
    expected = torch.log_softmax(logits, -1)[positions - 1, episodes[0].token_ids[positions].astype(np.int64)]
    np.testing.assert_allclose(alone[0], expected.detach().numpy(), atol=1e-5)


def test_values_are_cut_to_each_episode(model):
    torch.nn.init.normal_(model.critic.head.weight)
    episodes = ragged_episodes(4)
    together = evaluate_critic(model.critic, episodes, max_tokens=10_000)
    for episode, values in zip(episodes, together, strict=True):
        assert len(values) == len(episode.token_ids)
        with torch.no_grad():
            expected = model.critic.values(torch.from_numpy(episode.token_ids[None].astype(np.int64)))[0]
        np.testing.assert_allclose(values, expected.numpy(), atol=1e-5)


def test_infra_failures_leave_loss_and_statistics(model):
    sound = sampled_by(model, ragged_episodes(6))
    broken = [dataclasses.replace(t, rewards=t.rewards + 100) for t in ragged_episodes(3, seed=7, end_reason="infra_failure")]
    optim = OptimConfig(epochs=1, critic_epochs=1)
    clean, clean_metrics = one_step(model, sound, optim)
    mixed, mixed_metrics = one_step(model, [broken[0], *sound, *broken[1:]], optim)
    assert mixed_metrics.pop("batch/infra_failures") == 3
    assert clean_metrics.pop("batch/infra_failures") == 0
    for name in clean_metrics:
        if not name.startswith("time/"):
            assert mixed_metrics[name] == clean_metrics[name] or math.isnan(clean_metrics[name]), name
    assert all(torch.equal(a, b) for a, b in zip(clean.parameters(), mixed.parameters(), strict=True))
    with pytest.raises(LearnerError, match="infra failures"):
        one_step(model, broken, optim)


def test_update_is_deterministic(model):
    episodes = GAME.play(model.actor, 64, seed=0)
    assert any(t.rewards.any() for t in episodes)
    first, first_metrics = one_step(model, episodes, OptimConfig(), PPOConfig())
    second, second_metrics = one_step(model, episodes, OptimConfig(), PPOConfig())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert {k: v for k, v in first_metrics.items() if "time/" not in k} == {k: v for k, v in second_metrics.items() if "time/" not in k}


def test_two_critic_steps_for_one_of_the_actor(model):
    _, metrics = one_step(model, GAME.play(model.actor, 16, seed=0), OptimConfig(), PPOConfig())
    assert (metrics["train/actor_steps"], metrics["train/critic_steps"]) == (4, 8)


# ------------------------------------------------------------------------------------------------------------------------------ R3
def test_replay_reproduces_the_sampler_and_is_counted(model):
    episodes = GAME.play(model.actor, 12, seed=0)
    _, metrics = one_step(model, episodes, OptimConfig(), PPOConfig())
    assert metrics["routing/fallback_fraction"] == 0
    assert metrics["routing/rows"] == 12 * 8  # of 9 tokens an episode, the last decides nothing
    assert metrics["routing/live_disagreement"] == 0
    assert metrics["mismatch/max_abs_delta_logp"] < 1e-5


def test_replayed_routes_matter_and_missing_rows_are_counted(model):
    episodes = GAME.play(model.actor, 4, seed=0)
    assert episodes[0].routes is not None
    assert episodes[0].routes_valid is not None
    shifted = [dataclasses.replace(t, routes=(t.routes + 1) % 4) for t in episodes]
    batch = build_batch(shifted, range(4))
    live, forced = actor_forward(model.actor, batch), actor_forward(model.actor, batch, replay=True)
    assert (live.logprobs - forced.logprobs).abs().max() > 1e-3
    assert forced.routes is not None
    assert forced.routes.fallback_fraction == 0
    half = episodes[0].routes_valid & (np.arange(9) % 2 == 0)
    holed = [dataclasses.replace(t, routes_valid=half) for t in episodes]
    _, metrics = evaluate_actor(model.actor, holed, max_tokens=1000, temperature=1.0, replay=True)
    assert metrics["routing/fallback_fraction"] == pytest.approx(0.5)


def test_replay_without_routes_is_refused(model):
    with pytest.raises(BatchError, match="carry none"):
        one_step(model, ragged_episodes(2), OptimConfig(), PPOConfig())


def test_rows_that_matter_end_before_the_last_action():
    short = toy_trajectory([("prompt", -1, [1, 2]), ("sampled", 0, [3])], [1.0])
    long = toy_trajectory([("prompt", -1, [1]), ("sampled", 0, [2, 3]), ("env_content", 0, [4, 5])], [1.0])
    assert rows_that_matter(build_batch([short, long], [0, 1])).tolist() == [
        [True, True, False, False, False],
        [True, True, False, False, False],
    ]


# ---------------------------------------------------------------------------------------------------------------------- refusals
def test_wrong_temperature_is_caught_before_the_first_step(model, monkeypatch):
    episodes = GAME.play(model.actor, 8, seed=0)
    learner = Learner(model, PPOConfig(), OptimConfig())
    real = prepare_experience

    def hot(*args, **kwargs):
        return real(*args, **{**kwargs, "temperature": 2.0})

    monkeypatch.setattr("t1_agent.train.learner.prepare_experience", hot)
    before = [p.clone() for p in model.actor.parameters()]
    with pytest.raises(LearnerError, match="ratio_tolerance"):
        learner.update(episodes, seed=0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.actor.parameters(), strict=True))


def test_off_by_one_in_the_sampler_shows_in_the_mismatch(model):
    episodes = GAME.play(model.actor, 8, seed=0)
    rolled = []
    for t in episodes:
        logprobs = t.logprobs.copy()
        logprobs[t.loss_mask] = np.roll(logprobs[t.loss_mask], 1)
        rolled.append(dataclasses.replace(t, logprobs=logprobs))
    _, right = one_step(model, episodes, OptimConfig(), PPOConfig())
    _, wrong = one_step(model, rolled, OptimConfig(), PPOConfig())
    assert wrong["mismatch/mean_abs_delta_logp"] > 0.1 > 1e-5 > right["mismatch/mean_abs_delta_logp"]


def test_kl_needs_a_reference(model):
    with pytest.raises(LearnerError, match="reference"):
        Learner(model, PPOConfig(kl_coef=0.1), OptimConfig())


def test_kl_holds_the_policy_to_its_reference(model):
    reference = copy.deepcopy(model.actor)
    moved = {}
    for coef in (0.0, 20.0):
        trained = copy.deepcopy(model)
        learner = Learner(trained, PPOConfig(kl_coef=coef, kl_kind="k2"), OptimConfig(actor_lr=1e-3), reference=reference)
        for seed in range(3):
            learner.update(GAME.play(trained.actor, 16, seed=seed), seed=seed)
        batch = build_batch(GAME.play(reference, 16, seed=9), range(16))
        with torch.no_grad():
            moved[coef] = float((actor_forward(trained.actor, batch).logprobs - actor_forward(reference, batch).logprobs).abs().mean())
    assert moved[20.0] < 0.5 * moved[0.0]


def test_target_kl_stops_the_actor_epochs(model):
    episodes = GAME.play(model.actor, 64, seed=0)
    _, metrics = one_step(model, episodes, OptimConfig(epochs=4, actor_lr=1e-2), PPOConfig(target_kl=1e-4))
    assert metrics["train/actor_steps"] < 8
    assert metrics["train/last_epoch_kl"] > 1e-4


def test_tis_cap_bounds_the_weight_of_a_wrong_sampler(model):
    episodes = GAME.play(model.actor, 8, seed=0)
    wrong = []
    for t in episodes:
        wrong.append(dataclasses.replace(t, logprobs=np.where(t.loss_mask, t.logprobs - 3.0, 0.0).astype(np.float32)))
    _, metrics = one_step(model, wrong, OptimConfig(), PPOConfig(tis_cap=2.0))
    assert metrics["train/tis_capped_fraction"] == 1.0


def test_gradient_that_is_not_finite_is_refused(model):
    parameter = next(model.actor.parameters())
    parameter.grad = torch.full_like(parameter, float("nan"))
    with pytest.raises(FloatingPointError, match="not finite"):
        clip_gradients([parameter], 1.0)


def test_truncated_episodes_bootstrap_and_terminated_ones_do_not(model):
    torch.nn.init.ones_(model.critic.head.weight)
    segments = [("prompt", -1, [1, 2]), ("sampled", 0, [3]), ("env_content", 0, [4])]
    done, cut = (toy_trajectory(segments, [1.0], end_reason=reason) for reason in ("submitted", "turn_limit"))
    experience = prepare_experience((done, cut), Replicas(model.actor, 1), Replicas(model.critic, 1), LIVE, max_tokens=100, temperature=1.0)
    end_value = evaluate_critic(model.critic, [cut], max_tokens=100)[0][-1]
    assert experience.returns[0] == pytest.approx([1.0])
    assert experience.returns[1] == pytest.approx([1.0 + end_value], rel=1e-5)


# -------------------------------------------------------------------------------------------------------------------- warm starts
def test_actor_warm_start_learns_the_demonstrations_and_nothing_else(model):
    config = WarmstartConfig(actor_steps=150, actor_lr=5e-3, actor_batch_episodes=8)
    steps = []
    demonstrations = GAME.demonstrations(64, seed=0)
    metrics = warmstart_actor(model.actor, demonstrations, config, seed=0, report=lambda step, steps_, m: steps.append((step, steps_)))
    assert metrics["warmstart/loss"] < 0.05
    assert metrics["warmstart/confident"] > 0.95
    assert steps[0] == (1, 150)
    assert steps[-1] == (150, 150)
    solved = [t.solved for t in GAME.play(model.actor, 64, seed=5)]
    assert np.mean(solved) > 0.8


def test_actor_warm_start_is_deterministic_and_ignores_text_of_the_environment(model):
    config = WarmstartConfig(actor_steps=5, actor_batch_episodes=4)
    twin = copy.deepcopy(model.actor)
    demonstrations = GAME.demonstrations(16, seed=0)
    warmstart_actor(model.actor, demonstrations, config, seed=1)
    warmstart_actor(twin, demonstrations, config, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(model.actor.parameters(), twin.parameters(), strict=True))
    # Loss positions only: a sequence whose sampled part is empty has nothing to teach.
    with pytest.raises(LearnerError, match="none of 1"):
        warmstart_actor(twin, [toy_trajectory([("prompt", -1, [1, 2, 3])], [], end_reason="turn_limit")], config, seed=1)


def test_critic_warm_start_explains_returns_and_keeps_the_best_pass(model):
    rng = np.random.default_rng(0)
    episodes = []
    for _ in range(80):
        good = int(rng.integers(0, 2))
        # The prompt tells the return: 5 after token 7, 0 after token 8.
        segments = [("prompt", -1, [1, 7 if good else 8]), ("sampled", 0, rng.integers(0, 7, 3)), ("env_content", 0, [2])]
        episodes.append(toy_trajectory(segments, [5.0 * good]))
    passes = []
    metrics = warmstart_critic(
        model.critic, episodes, WarmstartConfig(critic_max_epochs=30, critic_lr=3e-3), seed=0,
        report=lambda step, steps, m: passes.append(m["critic/explained_variance"]),
    )  # fmt: skip
    assert metrics["critic/explained_variance"] > 0.9
    assert metrics["critic/explained_variance"] in passes
    assert metrics["critic/explained_variance"] == pytest.approx(max(passes), abs=2e-3)
    assert metrics["critic/explained_variance/turn_0-1"] == pytest.approx(metrics["critic/explained_variance"])
    values = evaluate_critic(model.critic, episodes[:1], max_tokens=100)[0]
    assert values[1] == pytest.approx(float(episodes[0].rewards[0]), abs=1.5)


def test_critic_warm_start_stops_when_nothing_can_be_explained(model):
    rng = np.random.default_rng(0)
    episodes = [toy_trajectory([("prompt", -1, [1]), ("sampled", 0, [2])], [float(rng.normal())]) for _ in range(20)]
    metrics = warmstart_critic(model.critic, episodes, WarmstartConfig(critic_max_epochs=50, critic_patience=2), seed=0)
    assert metrics["critic/passes"] < 50
    with pytest.raises(LearnerError, match="at least 2"):
        warmstart_critic(model.critic, episodes[:1], WarmstartConfig(), seed=0)


def test_schedules():
    assert learning_rate_factor(0, 100, 10, "cosine") == pytest.approx(0.1)
    assert learning_rate_factor(9, 100, 10, "cosine") == pytest.approx(1.0)
    assert learning_rate_factor(99, 100, 10, "cosine") == pytest.approx(0.1, abs=1e-3)
    assert learning_rate_factor(55, 100, 10, "linear") == pytest.approx(0.55)
    assert learning_rate_factor(99, 100, 10, "constant") == 1.0


def test_bucketed_batches_see_every_episode_once_a_pass():
    lengths = list(np.random.default_rng(0).integers(1, 100, 50))
    stream = bucketed_batches(lengths, 8, np.random.default_rng(1))
    one_pass = [next(stream) for _ in range(7)]
    assert sorted(itertools.chain.from_iterable(one_pass)) == list(range(50))
    assert sorted(itertools.chain.from_iterable(next(stream) for _ in range(7))) == list(range(50))
    spread = [max(lengths[i] for i in batch) - min(lengths[i] for i in batch) for batch in one_pass]
    assert np.mean(spread) < 25


# ----------------------------------------------------------------------------------------------------------------------- threads
def test_two_threads_learn_the_same_and_are_deterministic(model):
    episodes = GAME.play(model.actor, 64, seed=0)
    alone, _ = one_step(model, episodes, OptimConfig(micro_batch_tokens=90), PPOConfig())
    twice = [one_step(model, episodes, OptimConfig(micro_batch_tokens=90, threads=2), PPOConfig())[0] for _ in range(2)]
    for (name, a), b, c in zip(twice[0].named_parameters(), twice[1].parameters(), alone.parameters(), strict=True):
        assert torch.equal(a, b), name
        torch.testing.assert_close(a, c, atol=5e-4, rtol=1e-2, msg=name)


def test_replicas_sum_gradients_and_follow_the_optimiser():
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 1)
    replicas = Replicas(module, 3)
    items = [torch.randn(3) for _ in range(7)]

    def work(twin, item):
        loss = twin(item).square().sum()
        loss.backward()
        return float(loss.detach())

    losses = replicas.run(work, items, lambda item: 1, gradients=True)
    expected = sum(module(item).square().sum() for item in items)
    (gradient,) = torch.autograd.grad(expected, [module.weight])
    torch.testing.assert_close(module.weight.grad, gradient)
    with torch.no_grad():
        assert losses == pytest.approx([float(module(item).square()) for item in items])
        module.weight += 1.0
    values = replicas.run(lambda twin, item: float(twin(item)), items, lambda item: 1)
    with torch.no_grad():
        assert values == pytest.approx([float(module(item)) for item in items])


def test_an_error_in_a_thread_reaches_the_caller():
    replicas = Replicas(torch.nn.Linear(1, 1), 2)

    def fail(twin, item):
        if item == 1:
            raise RuntimeError("thread trouble")
        return item

    with pytest.raises(RuntimeError, match="thread trouble"):
        replicas.run(fail, [0, 1], lambda item: 1)


def test_dealing_is_even_and_complete():
    hands = deal([5, 1, 4, 2, 3, 3], 2)
    assert sorted(itertools.chain.from_iterable(hands)) == list(range(6))
    sums = [sum([5, 1, 4, 2, 3, 3][i] for i in hand) for hand in hands]
    assert sums == [9, 9]
    assert deal([1], 3) == [[0], [], []]
