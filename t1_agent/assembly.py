"""Puts a training run together: real terminals, the transformers engine, the tokenizer, held-out evaluations, what is kept on disk."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch

from t1_agent.config import RunConfig
from t1_agent.engines.hf import HFEngine
from t1_agent.eval.mismatch import mismatch_table
from t1_agent.eval.results import evaluate_trajectories
from t1_agent.models.tiny_moe import build_actor, parameter_count, tiny_moe_config
from t1_agent.rollout.collector import Collector, CollectorConfig, EnvFactory
from t1_agent.rollout.demonstrations import Script, record_demonstrations, write_script
from t1_agent.rollout.episode import EpisodeLimits
from t1_agent.rollout.store import save_trajectories
from t1_agent.sync.inprocess import InProcessSink
from t1_agent.tito.codec import TurnCodec
from t1_agent.tito.drift import baseline_drift_tokens
from t1_agent.tito.tokenizer import ChatTokenizer, train_tokenizer
from t1_agent.train import parts as train_parts
from t1_agent.train.episodes import episode_metrics
from t1_agent.train.rundir import RunDir, write_atomically
from t1_agent.train.seeds import derive_seed
from t1_agent.types import SamplingParams, Trajectory
from t1_env import ENV_ID, Task, resolve_tasks
from t1_env.errors import ConfigError

TOKENIZER_TEXTS = 600
"""Scripts whose instruction and commands the tokenizer is trained on."""


def draw_tasks(specs: Sequence[str], n: int, seed: int, *, split: str | None = None) -> list[Task]:
    """Draw ``n`` tasks, the specs taking turns; a pure function of the arguments.

    Args:
        specs: Task ids or family specs.
        n: How many.
        seed: Names the draw.
        split: Replaces the split of family specs (``"test"`` for held-out instances).
    """
    sources = [resolve_tasks(with_split(spec, split) if split else spec) for spec in specs]
    rng = random.Random(seed)
    return [sources[index % len(sources)].sample(rng.randrange(2**31)) for index in range(n)]


def task_ids(specs: Sequence[str], n: int, seed: int, *, split: str | None = None) -> list[str]:
    """Ids of ``draw_tasks``."""
    return [task.id for task in draw_tasks(specs, n, seed, split=split)]


def with_split(spec: str, split: str) -> str:
    """The family spec with another split; a spec that names no family is returned as it is."""
    if not spec.startswith("families/") or "seed=" in spec:
        return spec
    name, _, query = spec.partition("?")
    options = [part for part in query.split("&") if part and not part.startswith("split=")]
    return f"{name}?{'&'.join([*options, f'split={split}'])}"


def family_of(spec: str) -> str:
    """Name a task is counted under: the family's, or the whole id."""
    return spec.partition("?")[0].removeprefix("families/")


def check_tasks(config: RunConfig) -> None:
    """Refuse, before anything is written, a configuration whose tasks do not exist or a machine that cannot play them.

    Raises:
        ConfigError: If no training task is configured.
        UnknownTask: If one does not exist.
        SandboxUnavailable: If this machine cannot run the sandbox.
    """
    if not config.tasks.train:
        raise ConfigError("tasks.train is empty: start from a recipe (@quickstart) or name tasks: --tasks.train '[\"seeds/hello-file\"]'")
    resolve_tasks([*config.tasks.train, *config.tasks.held_out])
    env = gym.make(ENV_ID, disable_env_checker=True, task=list(config.tasks.train))
    try:
        env.reset(seed=config.seed)
    finally:
        env.close()


class Assembly:
    """The parts of one run: everything ``t1_agent.train.loop.train`` needs from outside.

    Args:
        config: The run's configuration.
        run: Its directory.
        say: Takes progress lines.
    """

    def __init__(self, config: RunConfig, run: RunDir, say: Callable[[str], None]) -> None:
        self._config = config
        self._run = run
        self._say = say
        self._open: list[Collector] = []
        self._limits = EpisodeLimits(
            max_turns=config.rollout.max_turns,
            max_context_tokens=config.rollout.max_context_tokens,
            max_turn_tokens=config.rollout.max_turn_tokens,
            observation_chars=config.rollout.observation_chars,
        )

    def parts(self) -> train_parts.Parts:
        """What the training loop calls."""
        return train_parts.Parts(
            demonstrate=self.demonstrate, build_actor=self.build_actor, connect=self.connect, keep=self.keep, say=self._say
        )

    @property
    def tokenizer_dir(self) -> Path:
        """Where the run keeps its tokenizer."""
        return self._run.path / "tokenizer"

    def codec(self) -> TurnCodec:
        """The codec over the run's tokenizer, which must have been trained."""
        return TurnCodec(ChatTokenizer.load(self.tokenizer_dir))

    def make_env(self, verify: str = "change", *, verbatim: bool = False) -> Any:
        """One environment. ``submit`` ends an episode, not the verifiers: stopping is the policy's to learn.

        Args:
            verify: When the verifiers run.
            verbatim: Whether a task's own ``test.sh`` has the last word: for evaluations. Most training episodes are so short that it would
                cost them half as much again.
        """
        env = gym.make(
            ENV_ID,
            disable_env_checker=True,
            task=list(self._config.tasks.train),
            max_turns=self._config.rollout.max_turns,
            end_on_solved=False,
            verify=verify,
            verbatim=verbatim,
            timing=False,
            step_timeout_s=10.0,
            max_output_bytes=4096,
        )
        return env.unwrapped

    # ------------------------------------------------------------------------------------------------------ demonstrations
    def demonstrate(self, seed: int) -> list[Trajectory]:
        """Train the tokenizer and record the demonstrations through the environment and the ledger."""
        started = time.perf_counter()
        tasks = draw_tasks(self._config.tasks.train, self._config.demos.episodes, derive_seed(seed, "tasks"))
        scripts = self._scripts(tasks, seed)
        tokenizer = train_tokenizer(_tokenizer_texts(tasks, scripts), vocab_size=self._config.model.vocab_size)
        tokenizer.save(self.tokenizer_dir)
        self._say(f"tokenizer: {tokenizer.vocab_size} tokens")
        total = len(scripts)

        def progress(done: int, of: int) -> None:
            if done % max(1, total // 8) == 0 or done == of:
                self._say(f"demonstrations {done}/{of}  {time.perf_counter() - started:.0f} s")

        demonstrations = record_demonstrations(
            partial(self.make_env, "end"),  # a supervised loss needs no reward in between
            TurnCodec(tokenizer),
            scripts,
            limits=self._limits,
            seed=seed,
            threads=self._config.demos.env_threads,
            progress=progress,
        )
        self.keep("demonstrations", demonstrations)
        metrics = episode_metrics(demonstrations) | {
            "demonstrations/flawed": float(sum(t.metadata["slip"] is not None for t in demonstrations)),
            "time/seconds": time.perf_counter() - started,
        }
        self._run.log("demonstrations", 0, metrics)
        return demonstrations

    def _scripts(self, tasks: Sequence[Task], seed: int) -> list[Script]:
        rng = random.Random(seed)
        return [write_script(task, rng, flawed_fraction=self._config.demos.flawed_fraction) for task in tasks]

    # --------------------------------------------------------------------------------------------------------------- model
    def build_actor(self, seed: int) -> Any:
        """The tiny MoE over the run's tokenizer."""
        tokenizer = ChatTokenizer.load(self.tokenizer_dir)
        model = self._config.model
        config = tiny_moe_config(
            tokenizer.vocab_size,
            hidden=model.hidden,
            layers=model.layers,
            heads=model.heads,
            kv_heads=model.kv_heads,
            experts=model.experts,
            top_k=model.top_k,
            moe_intermediate=model.moe_intermediate,
            max_positions=model.max_positions,
            pad_token_id=tokenizer.pad_id,
            eos_token_id=tokenizer.eos_id,
        )
        actor = build_actor(config, seed)
        actor.set_attn_implementation(model.attention)
        actor.set_experts_implementation(model.experts_implementation)
        self._say(f"actor: {parameter_count(actor):,} parameters")
        return actor

    def connect(self, actor: Any) -> tuple[train_parts.Collector, train_parts.Evaluator, train_parts.WeightSink]:
        """Engine, collector, evaluator and weight sink for an actor."""
        codec = self.codec()
        engine = self._engine(actor, codec, None)
        collector = self._collector(self.make_env, engine, codec, self._config.rollout.temperature)
        evaluation_env = partial(self.make_env, verbatim=True)
        evaluator = _Evaluator(self, actor, self._collector(evaluation_env, engine, codec, self._config.eval.temperature), codec)
        return _TaskCollector(collector, self._config.rollout.group_size), evaluator, InProcessSink(engine)

    def _engine(self, actor: Any, codec: TurnCodec, dtype: torch.dtype | None) -> HFEngine:
        return HFEngine(
            actor,
            stop_token_ids=sorted(codec.stop_ids),
            pad_token_id=codec.tokenizer.pad_id,
            dtype=dtype,
            record_routes=self._config.rollout.record_routes,
        )

    def _collector(self, make_env: EnvFactory, engine: HFEngine, codec: TurnCodec, temperature: float) -> Collector:
        rollout = self._config.rollout
        config = CollectorConfig(rollout.concurrency, rollout.env_threads, rollout.groups, rollout.max_infra_retries)
        params = SamplingParams(temperature=temperature, max_tokens=rollout.max_turn_tokens)
        collector = Collector(make_env, engine, codec, params, self._limits, config)
        self._open.append(collector)
        return collector

    def close(self) -> None:
        """Close every sandbox of the run. Idempotent."""
        for collector in self._open:
            collector.close()

    def keep(self, name: str, episodes: Sequence[Trajectory]) -> None:
        """Store episodes under ``rollouts/``."""
        save_trajectories(self._run.rollouts / f"{name}.parquet", episodes)

    # ---------------------------------------------------------------------------------------------------------- evaluation
    def evaluation_set(self) -> tuple[list[str], list[str]]:
        """(task ids, groups): held-out instances of the training families, then instances of the held-out families.

        The set depends on ``eval.seed`` alone, not on the run's seed: runs are compared on the same tasks.
        """
        tasks, groups = [], []
        for specs, n, prefix in (
            (self._config.tasks.train, self._config.eval.instances, ""),
            (self._config.tasks.held_out, self._config.eval.held_out_instances, "held-out: "),
        ):
            if specs:
                ids = task_ids(specs, n, derive_seed(self._config.eval.seed, prefix), split="test")
                tasks += ids
                groups += [prefix + family_of(task_id) for task_id in ids]
        return tasks, groups

    def evaluate(self, tag: str, collector: Collector, tokenizer: ChatTokenizer) -> dict[str, Any]:
        """Play the evaluation set and keep results and episodes under ``eval/``."""
        started = time.perf_counter()
        tasks, groups = self.evaluation_set()
        episodes = collector.collect(tasks, seed=derive_seed(self._config.eval.seed, "sample"))
        result = evaluate_trajectories(tag, episodes, groups, time.perf_counter() - started)
        folder = self._run.path / "eval"
        save_trajectories(folder / f"{tag}.parquet", episodes)
        result.save(folder / f"{tag}.json")
        held_in = [e for e in result.episodes if not e.group.startswith("held-out")]
        held_out = [e for e in result.episodes if e.group.startswith("held-out")]
        metrics = episode_metrics(episodes)
        sound = [t for t in episodes if not t.infra_failure]
        metrics["tito/drift_tokens_in_loss"] = float(sum(t.metadata["drift_tokens_in_loss"] for t in sound))
        metrics["tito/baseline_drift_tokens"] = float(sum(baseline_drift_tokens(t, tokenizer) for t in sound))
        said = []
        for name, part in (("held_out_instances", held_in), ("held_out_families", held_out)):
            if part:
                solved = metrics[f"eval/{name}/solved_rate"] = sum(e.solved for e in part) / len(part)
                verifiers = metrics[f"eval/{name}/verifiers_mean"] = sum(e.verifiers_passed for e in part) / len(part)
                said.append(f"{name.replace('_', ' ')} {100 * solved:.1f}% solved, {verifiers:.2f} verifiers (n={len(part)})")
        self._say(f"evaluation {tag}: {'; '.join(said)}")
        return metrics

    def measure_mismatch(self, actor: Any, codec: TurnCodec) -> None:
        """Sample part of the evaluation set in bfloat16 and score it with the float32 trainer: ``mismatch.json``."""
        tasks, _ = self.evaluation_set()
        wanted = min(self._config.eval.mismatch_episodes, len(tasks))
        if not wanted:
            return
        # Spread over the whole set, so that every family is in it, the held-out ones too.
        tasks = [tasks[index * len(tasks) // wanted] for index in range(wanted)]
        engine = self._engine(actor, codec, torch.bfloat16)
        collector = self._collector(self.make_env, engine, codec, self._config.rollout.temperature)
        episodes = collector.collect(tasks, seed=derive_seed(self._config.eval.seed, "mismatch"))
        collector.close()
        table = mismatch_table(
            actor,
            episodes,
            codec.tokenizer,
            sampler_dtype="bfloat16",
            trainer_dtype=str(next(actor.parameters()).dtype).removeprefix("torch."),
            temperature=self._config.rollout.temperature,
            max_tokens=self._config.optim.micro_batch_tokens,
        )
        for row in table["rows"]:
            self._say(
                f"mismatch, TITO {row['tito']}, R3 {row['r3']}: mean |delta log p| {row['mean_abs']:.5f}, "
                f"{row['drift_tokens']} drift tokens in the loss"
            )
        write_atomically(self._run.path / "mismatch.json", json.dumps(table, indent=1) + "\n")


def _tokenizer_texts(tasks: Sequence[Task], scripts: Sequence[Script]) -> list[str]:
    instructions = [task.instruction for task in tasks[:TOKENIZER_TEXTS]]
    # Every observation opens with the exit status; a demonstration rarely shows any but 0.
    statuses = [f"exit {status}" for status in (0, 1, 2, 126, 127)] * 50
    return [*instructions, *("\n".join(script.turns) for script in scripts[:TOKENIZER_TEXTS]), *statuses]


class _TaskCollector:
    """Draws the instances of a collection and plays them."""

    def __init__(self, collector: Collector, group_size: int) -> None:
        self._collector = collector
        self._group_size = group_size

    def collect(self, policy_version: int, n_episodes: int, seed: int, tasks: Sequence[str]) -> list[Trajectory]:
        drawn = task_ids(tasks, -(-n_episodes // self._group_size), seed)
        ids = [task_id for task_id in drawn for _ in range(self._group_size)][:n_episodes]
        episodes = self._collector.collect(ids, seed=seed)
        for trajectory in episodes:
            versions = trajectory.weight_versions
            if versions is not None and (stale := set(versions[trajectory.loss_mask].tolist()) - {policy_version}):
                raise ConfigError(f"episode of {trajectory.task_id} was sampled by weight versions {stale}, expected {policy_version}")
        return episodes


class _Evaluator:
    """Evaluates the weights pushed last; measures the mismatch at the end of the run."""

    def __init__(self, assembly: Assembly, actor: Any, collector: Collector, codec: TurnCodec) -> None:
        self._assembly = assembly
        self._actor = actor
        self._collector = collector
        self._codec = codec

    def evaluate(self, tag: str) -> dict[str, Any]:
        metrics = self._assembly.evaluate(tag, self._collector, self._codec.tokenizer)
        if tag == "ppo":
            self._assembly.measure_mismatch(self._actor, self._codec)
        return metrics
