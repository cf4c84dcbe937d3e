"""The whole road, in order: demonstrations, actor warm start, evaluation, critic warm start, PPO, evaluation.

Every phase and every iteration begins by seeding all generators from its name and ends with a checkpoint, so a run that is killed anywhere
and resumed does the same arithmetic as one that was left alone.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from transformers.utils import logging as transformers_logging

from t1_agent.config import RunConfig
from t1_agent.train.checkpoint import list_checkpoints
from t1_agent.train.episodes import episode_metrics
from t1_agent.train.parts import Collector, Evaluator, Parts, WeightSink
from t1_agent.train.progress import PPO_COLUMNS, progress_line, reporter
from t1_agent.train.rundir import RunDir
from t1_agent.train.seeds import derive_seed, seed_everything
from t1_agent.train.state import TrainState, make_critic, restore_or_start
from t1_agent.train.warmstart import warmstart_actor, warmstart_critic
from t1_agent.types import Trajectory


def train(config: RunConfig, run: RunDir, parts: Parts) -> TrainState:
    """Run, or continue, a training run to its end.

    Args:
        config: The run's configuration.
        run: Its directory, as ``open_run`` gave it; what it holds decides where to begin.
        parts: Everything outside the learner.

    Returns:
        The final state.
    """
    torch.set_num_threads(config.threads)
    # A bar for every checkpoint would bury the lines of progress.
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if config.tensorboard and not run.open_tensorboard():
        parts.say("TensorBoard is not installed: curves go to metrics.jsonl alone (pip install tensorboard)")
    demonstrations: list[Trajectory] = []
    if not list_checkpoints(run.checkpoints):
        run.truncate_metrics(0)  # lines of an attempt that died before its first checkpoint
        demonstrations = parts.demonstrate(derive_seed(config.seed, "demonstrations"))
    state = restore_or_start(config, run, parts.build_actor)
    collector, evaluator, sink = parts.connect(state.model.actor)
    road = _Road(config, run, parts, state, collector, evaluator, sink)
    sink.push(state.model.actor, state.progress.weight_version)
    if not state.reached("actor"):
        road.warm_actor(demonstrations)
    if not state.reached("critic"):
        road.evaluate("warmstart", 0)
        road.warm_critic()
    for iteration in range(state.progress.iteration, config.ppo.iterations):
        road.ppo_iteration(iteration)
    if not state.reached("done"):
        if config.ppo.iterations:
            road.evaluate("ppo", config.ppo.iterations)
        state.save("done", iteration=config.ppo.iterations, weight_version=state.progress.weight_version)
    return state


@dataclass(frozen=True, slots=True)
class _Road:
    config: RunConfig
    run: RunDir
    parts: Parts
    state: TrainState
    collector: Collector
    evaluator: Evaluator
    sink: WeightSink

    def warm_actor(self, demonstrations: list[Trajectory]) -> None:
        if self.config.eval.untrained:
            self.evaluate("untrained", 0)
        seed = self._seed("actor", 0)
        started = time.perf_counter()
        actor = self.state.model.actor
        metrics = warmstart_actor(
            actor,
            demonstrations,
            self.config.warmstart,
            seed=seed,
            micro_batch_tokens=self.config.optim.micro_batch_tokens,
            threads=self.config.optim.threads,
            report=reporter(self.run, self.parts.say, "actor", every=20),
        )
        self.state.model.critic = make_critic(self.config, actor)
        self.run.log("actor", self.config.warmstart.actor_steps, metrics | {"time/seconds": time.perf_counter() - started})
        self.state.save("actor", iteration=0, weight_version=self._push(self.state.progress.weight_version + 1))

    def warm_critic(self) -> None:
        if self.config.warmstart.critic_episodes and self.config.ppo.advantage == "gae":
            seed = self._seed("critic", 0)
            started = time.perf_counter()
            rollouts = self._collect("critic", 0, self.config.warmstart.critic_episodes)
            metrics = warmstart_critic(
                self.state.model.critic,
                rollouts,
                self.config.warmstart,
                seed=seed,
                gamma=self.config.ppo.gamma,
                gamma_level=self.config.ppo.gamma_level,
                micro_batch_tokens=self.config.optim.micro_batch_tokens,
                threads=self.config.optim.threads,
                report=reporter(self.run, self.parts.say, "critic", every=1),
            )
            self.run.log("critic", 0, metrics | episode_metrics(rollouts) | {"time/seconds": time.perf_counter() - started})
        self.state.save("critic", iteration=0, weight_version=self.state.progress.weight_version)

    def ppo_iteration(self, iteration: int) -> None:
        seed = self._seed("ppo", iteration)
        started = time.perf_counter()
        episodes = self._collect("iteration", iteration, self.config.rollout.episodes)
        collected = time.perf_counter()
        train_actor = iteration >= self.config.ppo.critic_only_iterations
        metrics = self.state.require_learner().update(episodes, seed=seed, train_actor=train_actor)
        metrics |= episode_metrics(episodes) | {"time/collect_s": collected - started, "time/update_s": time.perf_counter() - collected}
        self.run.log("ppo", iteration + 1, metrics)
        self.parts.say(progress_line(f"ppo {iteration + 1}/{self.config.ppo.iterations}", metrics, PPO_COLUMNS))
        every = self.config.eval.every
        version = self._push(self.state.progress.weight_version + train_actor)
        if every and (iteration + 1) % every == 0 and iteration + 1 < self.config.ppo.iterations:
            self.evaluate(f"iteration-{iteration + 1}", iteration + 1)
        self.state.save("iteration", iteration=iteration + 1, weight_version=version)

    def evaluate(self, tag: str, step: int) -> None:
        seed_everything(derive_seed(self.config.seed, "evaluate", tag))
        started = time.perf_counter()
        result = {name: float(value) for name, value in self.evaluator.evaluate(tag).items() if isinstance(value, int | float)}
        self.run.log(f"eval/{tag}", step, result | {"time/seconds": time.perf_counter() - started})

    def _collect(self, phase: str, index: int, n_episodes: int) -> list[Trajectory]:
        seed = derive_seed(self.config.seed, "collect", phase, index)
        episodes = self.collector.collect(self.state.progress.weight_version, n_episodes, seed, self.config.tasks.train)
        if self.parts.keep is not None:
            self.parts.keep(f"{phase}-{index:04d}", episodes)
        return episodes

    def _push(self, version: int) -> int:
        self.sink.push(self.state.model.actor, version)
        return version

    def _seed(self, phase: str, index: int) -> int:
        seed = derive_seed(self.config.seed, phase, index)
        seed_everything(seed)
        return seed
