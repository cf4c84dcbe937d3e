"""Configuration of training runs: one pydantic model a component, TOML recipes, dotted overrides. Importing this loads no torch.

``load_config(["@quickstart", "--ppo.clip_low", "0.1"])`` reads the shipped recipe ``quickstart`` (``@path.toml`` reads any file), applies
the overrides from left to right and checks the result. An unknown key is an error that names the nearest known one.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import tomllib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from t1_env.errors import ConfigError

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Unit = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]


class _Component(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)


class TaskConfig(_Component):
    """Which tasks are played. A family is named without its seed: training draws from its ``train`` split, evaluation from ``test``."""

    train: tuple[str, ...] = ()
    """Task ids or family specs (``families/<name>?level=1``) to train on."""
    held_out: tuple[str, ...] = ()
    """Family specs that are evaluated and never trained on."""


class ModelConfig(_Component):
    """The tiny Mixture-of-Experts actor; the critic has the same shape and its own weights."""

    vocab_size: Annotated[int, Field(ge=300, le=65_536)] = 768
    """Most entries of the byte-level BPE."""
    hidden: Count = 128
    """Width of the residual stream."""
    layers: Count = 4
    """Decoder layers, each with a Mixture of Experts."""
    heads: Count = 4
    """Query heads."""
    kv_heads: Count = 2
    """Key/value heads."""
    experts: Annotated[int, Field(ge=2)] = 8
    """Experts a layer."""
    top_k: Count = 2
    """Experts a token."""
    moe_intermediate: Count = 96
    """Width of one expert."""
    max_positions: Count = 2048
    """Longest sequence."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention kernel of trainer and sampler."""
    experts_implementation: Literal["grouped_mm", "eager", "batched_mm"] = "grouped_mm"
    """How the trainer computes experts; ``grouped_mm`` measured fastest on one CPU thread."""


class DemoConfig(_Component):
    """Demonstrations for the actor warm start, recorded through the environment and the ledger."""

    episodes: Count = 512
    """Demonstrations over all training families."""
    flawed_fraction: Unit = 0.5
    """Share of them that hold one wrong decision, so that there is something left for reinforcement learning."""
    env_threads: Count = 2
    """Threads that drive the terminals."""


class WarmstartConfig(_Component):
    """Supervised start of the actor and offline start of the critic."""

    actor_steps: Annotated[int, Field(ge=0)] = 600
    """Optimiser steps; 0 leaves the actor cold."""
    actor_lr: Positive = 2e-3
    """Peak learning rate of AdamW."""
    actor_batch_episodes: Count = 16
    """Demonstrations a step."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Decay after the warm-up, to a tenth of the peak."""
    actor_lr_warmup_steps: Annotated[int, Field(ge=0)] = 20
    """Steps of linear rise to the peak."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay of both warm starts."""
    critic_episodes: Annotated[int, Field(ge=0)] = 256
    """Rollouts of the warm-started actor for the critic; 0 leaves the critic cold."""
    critic_init: Literal["actor", "random"] = "actor"
    """Start the critic's trunk as a copy of the warm-started actor's, or fresh."""
    critic_lr: Positive = 5e-4
    """Learning rate of the offline regression."""
    critic_batch_episodes: Count = 16
    """Episodes a step."""
    critic_max_epochs: Count = 12
    """Most passes over the rollouts."""
    critic_holdout: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of the episodes on which explained variance is measured."""
    critic_patience: Count = 2
    """Stop after so many passes without a rise of explained variance, and keep the best."""


class RolloutConfig(_Component):
    """How episodes are sampled."""

    episodes: Count = 128
    """Episodes of a PPO iteration."""
    group_size: Count = 1
    """Episodes of each task instance; more than 1 is needed by the group baselines."""
    temperature: Positive = 1.0
    """Sampling temperature; log-probs everywhere are those of this distribution."""
    max_turns: Count = 16
    """Most turns of an episode."""
    max_turn_tokens: Count = 64
    """Most tokens of a turn."""
    max_context_tokens: Count = 1024
    """Most tokens of an episode."""
    observation_chars: Count = 240
    """Most characters of command output shown to the policy a turn."""
    concurrency: Count = 64
    """Most episodes in flight."""
    env_threads: Count = 2
    """Threads that drive the terminals."""
    groups: Count = 2
    """Groups that alternate between engine and terminals."""
    max_infra_retries: Annotated[int, Field(ge=0)] = 1
    """How often an episode that the machinery broke is played again."""
    record_routes: bool = True
    """Record the sampler's experts (R3)."""

    @model_validator(mode="after")
    def _whole_groups(self) -> RolloutConfig:
        if self.episodes % self.group_size:
            raise ValueError(f"episodes={self.episodes} is no multiple of group_size={self.group_size}")
        return self


class PPOConfig(_Component):
    """Objective and estimator."""

    iterations: Annotated[int, Field(ge=0)] = 15
    """Collect-and-update rounds; 0 stops after the warm start."""
    critic_only_iterations: Annotated[int, Field(ge=0)] = 0
    """First iterations that train the critic alone."""
    advantage: Literal["gae", "rloo", "grpo"] = "gae"
    """Estimator; the group baselines use no critic."""
    gamma: Unit = 1.0
    """Discount."""
    gamma_level: Literal["token", "turn"] = "turn"
    """Where the discount applies."""
    lam_actor: Unit = 0.95
    """GAE lambda of the advantages."""
    lam_critic: Unit = 1.0
    """GAE lambda of the critic's targets."""
    lam_level: Literal["token", "turn"] = "turn"
    """Where lambda applies."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Lower bound of the ratio is 1 - clip_low."""
    clip_high: Positive = 0.2
    """Upper bound of the ratio is 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound of the loss for negative advantages, or none."""
    value_clip: Positive | None = None
    """Largest rewarded move of a value in one update, or none."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL to the warm-started actor."""
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL."""
    tis_cap: Annotated[float, Field(ge=1)] | None = 2.0
    """Cap of the token-level importance weight of trainer over sampler, or none."""
    target_kl: Positive | None = None
    """Skip the update's remaining actor epochs once the approximate KL to the old policy passes this, or never."""
    replay_routes: bool = True
    """Replay the sampler's experts in the trainer (R3)."""
    ratio_tolerance: Positive = 1e-3
    """Largest mean |log ratio| before the first step of an update; more means that old and new policy are not computed alike."""


class OptimConfig(_Component):
    """Optimisers and batch geometry of the PPO update."""

    actor_lr: Positive = 2e-4
    """Learning rate of the actor."""
    critic_lr: Positive = 5e-4
    """Learning rate of the critic."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    beta2: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Second-moment decay of AdamW."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this norm."""
    epochs: Count = 2
    """Actor passes over the batch."""
    critic_epochs: Count = 2
    """Critic passes over the batch."""
    minibatches: Count = 2
    """Actor steps a pass."""
    critic_minibatches: Count = 4
    """Critic steps a pass; with the defaults two critic steps for one of the actor, at the same number of tokens."""
    micro_batch_tokens: Count = 2048
    """Padded tokens of one forward and backward pass."""
    threads: Count = 1
    """Micro-batches computed side by side, in threads that share the weights; another number sums gradients in another order."""


class EvalConfig(_Component):
    """Evaluation on held-out instances and families."""

    instances: Count = 64
    """Held-out instances of the training families, in total."""
    held_out_instances: Annotated[int, Field(ge=0)] = 16
    """Instances of the held-out families, in total."""
    temperature: NonNegative = 1.0
    """Sampling temperature; 0 is greedy."""
    every: Annotated[int, Field(ge=0)] = 0
    """Evaluate every so many PPO iterations beside the start and the end; 0 does not."""
    untrained: bool = True
    """Evaluate before the warm start too."""
    mismatch_episodes: Annotated[int, Field(ge=0)] = 48
    """Episodes sampled in bfloat16 at the end, for the sampler-against-trainer table; 0 leaves it out."""
    seed: int = 20_000
    """Names the sampling streams, the same for every evaluation so that they pair."""


class RunConfig(_Component):
    """A whole training run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    """Folder of the run under ``runs_dir``."""
    runs_dir: str = "runs"
    """Where runs live."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Names every random stream of the run."""
    threads: Count = 1
    """Torch threads inside an operation; on cores shared with terminals one is faster than two (see ``optim.threads``)."""
    keep_checkpoints: Count = 2
    """Iteration checkpoints kept; those at the end of a phase always stay."""
    tensorboard: bool = True
    """Write ``tb/`` beside ``metrics.jsonl``, where TensorBoard is installed."""
    tasks: TaskConfig = TaskConfig()
    model: ModelConfig = ModelConfig()
    demos: DemoConfig = DemoConfig()
    warmstart: WarmstartConfig = WarmstartConfig()
    rollout: RolloutConfig = RolloutConfig()
    ppo: PPOConfig = PPOConfig()
    optim: OptimConfig = OptimConfig()
    eval: EvalConfig = EvalConfig()

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if self.ppo.advantage != "gae" and self.rollout.group_size < 2:
            raise ValueError(f"ppo.advantage={self.ppo.advantage!r} compares episodes of one task: set rollout.group_size to 2 or more")
        if self.ppo.replay_routes and not self.rollout.record_routes:
            raise ValueError("ppo.replay_routes needs rollout.record_routes; switch both off or both on")
        if self.rollout.max_context_tokens > self.model.max_positions:
            raise ValueError(
                f"rollout.max_context_tokens={self.rollout.max_context_tokens} is more than model.max_positions={self.model.max_positions}"
            )
        return self

    def resolved(self) -> dict[str, Any]:
        """Every value as JSON-compatible data, as written beside the run."""
        return self.model_dump(mode="json")

    def digest(self) -> str:
        """SHA-256 (hex) of ``resolved()``."""
        return hashlib.sha256(json.dumps(self.resolved(), sort_keys=True).encode()).hexdigest()


# ----------------------------------------------------------------------------------------------------------------------- loading
def recipes() -> list[str]:
    """Names of the shipped recipes."""
    folder = resources.files("t1_agent") / "recipes"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_config(args: Sequence[str]) -> RunConfig:
    """Build a run's configuration from command-line arguments.

    Args:
        args: ``@recipe`` or ``@path.toml`` (any number, later wins) and ``--dotted.key value`` or ``--dotted.key=value``. Values are read
            as TOML where that is possible (``0.1``, ``true``, ``["a", "b"]``), as text otherwise; ``none`` unsets an optional value.

    Returns:
        The checked configuration.

    Raises:
        ConfigError: An unknown recipe, file or key, or a value that does not fit; the message names it.
    """
    data: dict[str, Any] = {}
    rest = list(args)
    while rest:
        argument = rest.pop(0)
        if argument.startswith("@"):
            _merge(data, _read_recipe(argument[1:]), source=argument)
        elif argument.startswith("--") and len(argument) > 2:
            key, equals, value = argument[2:].partition("=")
            if not equals:
                if not rest:
                    raise ConfigError(f"--{key}: a value is missing; write --{key} VALUE")
                value = rest.pop(0)
            _set(data, key.split("."), _parse_value(value), option=f"--{key}")
        else:
            raise ConfigError(f"argument {argument!r}: expected @recipe, @path.toml or --key value")
    return build_config(data)


def build_config(data: dict[str, Any]) -> RunConfig:
    """Check nested data and build the configuration.

    Raises:
        ConfigError: One line a problem, with a suggestion for a key that does not exist.
    """
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(problem) for problem in error.errors())) from None


def differing_keys(left: dict[str, Any], right: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys under which two resolved configurations differ."""
    keys: list[str] = []
    for key in sorted(left.keys() | right.keys()):
        ours, theirs = left.get(key), right.get(key)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            keys += differing_keys(ours, theirs, f"{prefix}{key}.")
        elif ours != theirs:
            keys.append(f"{prefix}{key}")
    return keys


def _read_recipe(name: str) -> dict[str, Any]:
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise ConfigError(f"@{name}: no such file")
        text = path.read_text(encoding="utf-8")
    else:
        resource = resources.files("t1_agent") / "recipes" / f"{name}.toml"
        if not resource.is_file():
            raise ConfigError(f"@{name}: no such recipe{_suggest(name, recipes())}; shipped: {', '.join(recipes())}")
        text = resource.read_text(encoding="utf-8")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"@{name}: not valid TOML: {error}") from None


def _parse_value(text: str) -> Any:
    if text.lower() in ("none", "null"):
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _set(data: dict[str, Any], path: list[str], value: Any, option: str) -> None:
    for part in path[:-1]:
        data = data.setdefault(part, {})
        if not isinstance(data, dict):
            raise ConfigError(f"{option}: {part!r} is a value, it has no keys below it")
    data[path[-1]] = value


def _merge(into: dict[str, Any], new: dict[str, Any], source: str) -> None:
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value, source)
        else:
            into[key] = value


def _known_keys(location: Sequence[str | int]) -> list[str]:
    """Keys of the component at ``location`` (dotted), or of the root."""
    model: type[BaseModel] = RunConfig
    for part in location:
        annotation = model.model_fields[str(part)].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)


def _all_keys() -> list[str]:
    return [f"{name}.{key}" if _known_keys([name]) else name for name in RunConfig.model_fields for key in (_known_keys([name]) or [""])]


def _suggest(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _explain(problem: Any) -> str:
    location = problem["loc"]
    dotted = ".".join(str(part) for part in location)
    if problem["type"] == "extra_forbidden":
        parent, word = location[:-1], str(location[-1])
        prefix = "".join(f"{part}." for part in parent)
        near = difflib.get_close_matches(word, _known_keys(parent), n=1, cutoff=0.5)
        # A key given without its component ("clip_low" for "ppo.clip_low") is the commonest slip.
        elsewhere = [key for key in _all_keys() if key.split(".")[-1] == word]
        hint = f" (did you mean '{prefix}{near[0]}'?)" if near else f" (did you mean {elsewhere[0]!r}?)" if elsewhere else ""
        return f"config: unknown key {dotted!r}{hint}"
    if not dotted:
        return f"config: {problem['msg'].removeprefix('Value error, ')}"
    return f"config: {dotted}: {problem['msg'].removeprefix('Value error, ')}, got {problem['input']!r}"
