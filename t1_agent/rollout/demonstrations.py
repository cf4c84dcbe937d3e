"""Demonstrations: a task's own solution, played through the environment and written into the ledger like any other episode.

Half of them may hold one wrong decision (a *slip* that ships with the task). A warm start on perfect demonstrations leaves a policy whose
remaining errors are copying errors, which reinforcement learning does not mend; one on imperfect demonstrations leaves decisions that
the verifiers can tell apart, which it does.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from t1_agent.rollout.collector import EnvFactory, stream_seed
from t1_agent.rollout.episode import Episode, EpisodeLimits
from t1_agent.tito.codec import TurnCodec
from t1_agent.tito.parse import SUBMIT_WORD
from t1_agent.types import Completion, Trajectory
from t1_env import Task
from t1_env.errors import TaskError


@dataclass(frozen=True, slots=True)
class Script:
    """What one demonstration does.

    Args:
        task_id: Task it plays.
        turns: Text of each turn; the last one submits.
        slip: Kind of the wrong decision it holds, or None.
    """

    task_id: str
    turns: tuple[str, ...]
    slip: str | None = None


def write_script(task: Task, rng: random.Random, *, flawed_fraction: float) -> Script:
    """Turn a task's solution into the turns of a demonstration.

    Args:
        task: Needs ``solution/solve.sh``; a slip is used only when the task ships some.
        rng: Decides whether there is a slip, and which.
        flawed_fraction: Probability of one.

    Raises:
        TaskError: If the task has no solution.
    """
    steps = list(task.oracle_steps())
    if not steps:
        raise TaskError(f"task {task.id!r} cannot be demonstrated: it has no solution/solve.sh")
    slips = task.slips()
    # Both draws always happen: the stream does not depend on what a task ships.
    flawed, choice = rng.random() < flawed_fraction, rng.random()
    if not (flawed and slips):
        return Script(task.id, (*steps, SUBMIT_WORD))
    slip = slips[int(choice * len(slips))]
    steps[slip.step] = slip.command
    return Script(task.id, (*steps, SUBMIT_WORD), slip.kind)


def record_demonstrations(
    make_env: EnvFactory,
    codec: TurnCodec,
    scripts: Sequence[Script],
    *,
    limits: EpisodeLimits,
    seed: int,
    threads: int = 2,
    progress: Callable[[int, int], None] | None = None,
) -> list[Trajectory]:
    """Play scripts in real sandboxes.

    The ids are the tokenizer's own, so the ledger's log-probs are 0 (nobody sampled them); only the supervised loss may use these
    episodes.

    Args:
        make_env: Makes one environment; one a thread.
        codec: Borders of a turn.
        scripts: What to play.
        limits: Turn and context limits, the same as in training.
        seed: Names the environments' seeds.
        threads: Terminals at work at once.
        progress: Called with (finished, total).

    Returns:
        One trajectory a script, in order; ``metadata["slip"]`` holds the kind of its wrong decision or None.
    """
    local = threading.local()
    envs = []
    finished = 0
    lock = threading.Lock()

    def play(index: int) -> Trajectory:
        nonlocal finished
        if not hasattr(local, "env"):
            local.env = make_env()
            with lock:
                envs.append(local.env)
        script = scripts[index]
        episode = Episode(local.env, codec, limits, session_id=f"demo/{index}")
        episode.begin(script.task_id, stream_seed("demo", seed, index))
        for text in script.turns:
            if episode.done:
                break
            ids = codec.encode_turn(text)
            episode.advance(Completion(ids, np.zeros(len(ids), dtype=np.float32), "stop", weight_version=-1))
        trajectory = episode.trajectory()
        with lock:
            finished += 1
            if progress is not None:
                progress(finished, len(scripts))
        return replace(trajectory, metadata={**trajectory.metadata, "slip": script.slip})

    try:
        with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="t1-demo") as pool:
            return list(pool.map(play, range(len(scripts))))
    finally:
        for env in envs:
            env.close()
