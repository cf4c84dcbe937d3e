"""Scripted agents and checks, for tests of your own tasks, wrappers and integrations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
from gymnasium.utils.env_checker import data_equivalence

from t1_env.errors import TaskError
from t1_env.protocol import Action, Command, EndReason, Submit
from t1_env.tasks import Task, resolve_tasks

__all__ = ["Rollout", "assert_deterministic", "noop_actions", "oracle_actions", "rollout"]


@dataclass(slots=True)
class Rollout:
    """One episode, as ``rollout`` played it.

    Args:
        actions: Actions that were taken.
        observations: Observation of the reset, then one for each action.
        rewards: Reward of each action.
        infos: Info of the reset, then one for each action.
        terminated: Whether the episode terminated.
        truncated: Whether it was truncated.
    """

    actions: list[Action] = field(default_factory=list)
    observations: list[Any] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    infos: list[dict[str, Any]] = field(default_factory=list)
    terminated: bool = False
    truncated: bool = False

    @property
    def ended(self) -> bool:
        """Whether the episode is over."""
        return self.terminated or self.truncated

    @property
    def solved(self) -> bool:
        """Whether every verifier passed at the last step."""
        last = self.infos[-1]
        return bool(0 < last["verifiers_total"] == last["verifiers_passed"])

    @property
    def infra_failure(self) -> bool:
        """Whether the machinery failed: such an episode says nothing about the agent."""
        return bool(self.infos[-1]["end_reason"] == EndReason.INFRA_FAILURE)


def oracle_actions(task: Task | str, *, timeout_s: float | None = None, submit: bool = False) -> list[Action]:
    """Return the actions of a task's own solution, one for each step of ``solution/solve.sh``.

    Args:
        task: A task, or the id or path of one.
        timeout_s: Time limit of each command, or None for the environment's.
        submit: Whether to add ``Submit()`` at the end (without it the episode ends when every verifier passes).

    Returns:
        The actions.

    Raises:
        TaskError: If the task has no solution.
    """
    found = task if isinstance(task, Task) else resolve_tasks(task).sample(0)
    steps = found.oracle_steps()
    if not steps:
        raise TaskError(f"task {found.id!r} has no oracle: expected commands in {found.path / 'solution' / 'solve.sh'}")
    actions: list[Action] = [step if timeout_s is None else Command(step, timeout_s) for step in steps]
    return [*actions, Submit()] if submit else actions


def noop_actions() -> list[Action]:
    """Return the actions of an agent that does nothing: it submits at once."""
    return [Submit()]


def rollout(
    env: gym.Env[Any, Any],
    actions: Iterable[Any],
    *,
    seed: int | None = None,
    options: dict[str, Any] | None = None,
    on_step: Callable[[Rollout], None] | None = None,
) -> Rollout:
    """Play one episode with the given actions, until they run out or the episode ends.

    Args:
        env: The environment; it is reset first and not closed.
        actions: Actions, in order; may be a generator.
        seed: Seed of the reset.
        options: Options of the reset.
        on_step: Called after each step with the episode so far.

    Returns:
        What happened.
    """
    episode = Rollout()
    observation, info = env.reset(seed=seed, options=options)
    episode.observations.append(observation)
    episode.infos.append(info)
    for action in actions:
        observation, reward, episode.terminated, episode.truncated, info = env.step(action)
        episode.actions.append(action)
        episode.observations.append(observation)
        episode.rewards.append(float(reward))
        episode.infos.append(info)
        if on_step is not None:
            on_step(episode)
        if episode.ended:
            break
    return episode


def assert_deterministic(make_env: Callable[[], gym.Env[Any, Any]], actions: Sequence[Any], *, seed: int = 0) -> Rollout:
    """Play the same actions in two fresh environments and compare everything but ``info["_timing"]``.

    Args:
        make_env: Makes one environment.
        actions: Actions of the episode.
        seed: Seed of both resets.

    Returns:
        The first of the two episodes.

    Raises:
        AssertionError: Naming the first step and part that differ.
    """
    episodes = []
    for _ in range(2):
        env = make_env()
        try:
            episodes.append(rollout(env, actions, seed=seed))
        finally:
            env.close()
    first, second = episodes
    for name in ("observations", "rewards", "infos"):
        ones, others = getattr(first, name), getattr(second, name)
        assert len(ones) == len(others), f"{name}: {len(ones)} in the first episode, {len(others)} in the second"
        for step, (one, other) in enumerate(zip(ones, others, strict=True)):
            assert data_equivalence(one, other, exact=True), f"{name} of step {step} differ:\n{one!r}\n{other!r}"
    assert (first.terminated, first.truncated) == (second.terminated, second.truncated), "the episodes ended differently"
    return first
