"""What a run carries from phase to phase, and how it is saved and picked up again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from t1_agent.config import RunConfig
from t1_agent.models.actor_critic import ActorCritic, load_actor
from t1_agent.models.critic import Critic
from t1_agent.train.checkpoint import Progress, list_checkpoints, load_checkpoint, prune_checkpoints, save_checkpoint
from t1_agent.train.learner import Learner
from t1_agent.train.rundir import RunDir
from t1_agent.train.seeds import derive_seed, restore_random_states
from t1_env.errors import ConfigError

PHASES = ("start", "actor", "critic", "iteration", "done")
"""Labels of checkpoints in the order of a run; ``start`` is the state before the first."""


@dataclass(slots=True)
class TrainState:
    """Models, optimisers and position of a run.

    Args:
        config: The run's configuration.
        run: Its directory.
        model: Actor and critic.
        learner: Built when PPO begins (or is resumed).
        progress: What was completed last.
    """

    config: RunConfig
    run: RunDir
    model: ActorCritic
    learner: Learner | None
    progress: Progress

    def reached(self, phase: str) -> bool:
        """Whether a phase is already behind the run."""
        return PHASES.index(self.progress.label) >= PHASES.index(phase)

    def save(self, label: str, *, iteration: int, weight_version: int) -> None:
        """Write a checkpoint, then drop old ones."""
        self.progress = Progress(
            sequence=self.progress.sequence + 1,
            label=label,
            iteration=iteration,
            weight_version=weight_version,
            metrics_bytes=self.run.metrics_size_bytes(),
            config_digest=self.config.digest(),
        )
        state = {} if self.learner is None else {"learner": self.learner.state_dict()}
        save_checkpoint(self.run.checkpoints, self.model, state, self.progress)
        prune_checkpoints(self.run.checkpoints, self.config.keep_checkpoints)

    def require_learner(self) -> Learner:
        """The learner, made now if this is the first PPO iteration."""
        if self.learner is None:
            self.learner = Learner(
                self.model,
                self.config.ppo,
                self.config.optim,
                temperature=self.config.rollout.temperature,
                reference=self._reference(),
            )
        return self.learner

    def _reference(self) -> Any | None:
        """The warm-started actor as it was saved, for the KL term."""
        if self.config.ppo.kl_coef == 0:
            return None
        source = next(path for path in list_checkpoints(self.run.checkpoints) if path.name.endswith("-actor"))
        return load_actor(source / "model" / "actor")


def make_critic(config: RunConfig, actor: Any) -> Critic:
    """A critic with a trunk of its own: a copy of the actor's, or fresh."""
    if config.warmstart.critic_init == "actor":
        return Critic.from_actor(actor)
    return Critic.from_config(actor.base_model.config, derive_seed(config.seed, "critic"))


def restore_or_start(config: RunConfig, run: RunDir, build_actor: Callable[[int], Any]) -> TrainState:
    """The state after the newest checkpoint, or that before the first phase.

    Weights are loaded into a freshly built actor, so that its kernels are those of the configuration and not the saved model's defaults.
    Lines of ``metrics.jsonl`` younger than the checkpoint are cut off: their work is done again.

    Raises:
        ConfigError: The checkpoint belongs to another configuration or does not fit the model.
    """
    actor = build_actor(derive_seed(config.seed, "actor"))
    model = ActorCritic(actor, make_critic(config, actor))
    found = list_checkpoints(run.checkpoints)
    if not found:
        return TrainState(config, run, model, None, Progress(-1, "start", 0, 0, 0, config.digest()))
    loaded, saved, progress = load_checkpoint(found[-1])
    if progress.config_digest != config.digest():
        raise ConfigError(f"checkpoint {found[-1]} was written under another configuration; start another run with --name")
    try:
        model.load_state_dict(loaded.state_dict())
    except RuntimeError as error:
        raise ConfigError(f"checkpoint {found[-1]} does not fit the model of this configuration: {error}") from None
    run.truncate_metrics(progress.metrics_bytes)
    state = TrainState(config, run, model, None, progress)
    if "learner" in saved:
        state.require_learner().load_state_dict(saved["learner"])
    restore_random_states(saved["random_states"])
    return state
