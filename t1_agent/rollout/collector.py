"""Many episodes at once: a batched engine on one side, a pool of terminals on the other.

Episodes are split into groups that take turns: while the terminals of one group run commands and verifiers, the engine samples for the
other, so that neither side idles. Within a group all unfinished episodes go through the engine in one batch.

Results are a pure function of (weights, tasks, seed): each generate call has its own sampling stream, named by the collection's seed,
the group and the round, so the order in which terminals finish does not matter.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from t1_agent.engines.base import Engine
from t1_agent.rollout.episode import Episode, EpisodeLimits
from t1_agent.tito.codec import TurnCodec
from t1_agent.types import SamplingParams, Trajectory

logger = logging.getLogger(__name__)

EnvFactory = Callable[[], Any]
"""Makes one environment (a ``gymnasium.Env`` with T1Terminal's spaces); called once a slot, reused over episodes."""


@dataclass(frozen=True, slots=True)
class CollectorConfig:
    """How wide to collect.

    Args:
        concurrency: Most episodes in flight, each with a sandbox of its own.
        env_threads: Threads that drive the terminals.
        groups: Number of groups that alternate between engine and terminals.
        max_infra_retries: How often an episode that the machinery broke is played again before it is given up and returned marked.
    """

    concurrency: int = 64
    env_threads: int = 4
    groups: int = 2
    max_infra_retries: int = 1


def stream_seed(*parts: object) -> int:
    """A 63-bit seed named by its parts, the same on every machine."""
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class Collector:
    """Plays episodes with an engine and returns them as trajectories, in the order of the tasks asked for.

    Args:
        make_env: Makes one environment.
        engine: Samples completions.
        codec: Turns text into token ids and back at the borders of a turn.
        params: Sampling parameters; the seed is replaced a call.
        limits: Turn, token and context limits of an episode.
        config: Width of the collection.
    """

    def __init__(
        self,
        make_env: EnvFactory,
        engine: Engine,
        codec: TurnCodec,
        params: SamplingParams,
        limits: EpisodeLimits,
        config: CollectorConfig | None = None,
    ) -> None:
        self._make_env = make_env
        self._engine = engine
        self._codec = codec
        self._params = params
        self._limits = limits
        self._config = config or CollectorConfig()
        self._envs: list[Any] = []
        self._pool = ThreadPoolExecutor(max_workers=self._config.env_threads, thread_name_prefix="t1-env")

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def collect(
        self, tasks: Sequence[str], *, seed: int, engine: Engine | None = None, progress: Callable[[int, int], None] | None = None
    ) -> list[Trajectory]:
        """Play one episode of each task.

        Args:
            tasks: Task ids, one an episode.
            seed: Names every random stream of this collection.
            engine: Sampler to use instead of the collector's own.
            progress: Called with (finished, total) as episodes end.

        Returns:
            One trajectory a task, in order. Those that the machinery broke are marked ``infra_failure``.
        """
        engine = engine or self._engine
        results: dict[int, Trajectory] = {}

        def on_end(index: int, trajectory: Trajectory) -> None:
            results[index] = trajectory
            if progress is not None:
                progress(len(results), len(tasks))

        attempt, waiting = 0, list(range(len(tasks)))
        while waiting:
            for start in range(0, len(waiting), self._config.concurrency):
                wave = waiting[start : start + self._config.concurrency]
                self._play_wave(wave, tasks, f"{seed}/{attempt}/{start}", engine, on_end)
            waiting = [index for index in waiting if results[index].infra_failure] if attempt < self._config.max_infra_retries else []
            attempt += 1
            for index in waiting:
                logger.warning("episode of %s failed in the machinery, playing it again: %s", tasks[index], results[index].metadata)
        return [results[index] for index in range(len(tasks))]

    def close(self) -> None:
        """Close every environment. Idempotent."""
        envs, self._envs = self._envs, []
        for future in [self._pool.submit(env.close) for env in envs]:
            future.result()
        self._pool.shutdown()

    def _play_wave(
        self, wave: Sequence[int], tasks: Sequence[str], stream: str, engine: Engine, on_end: Callable[[int, Trajectory], None]
    ) -> None:
        """Play the episodes of ``wave`` (indices into ``tasks``) to their ends, alternating between groups of slots."""
        while len(self._envs) < len(wave):
            self._envs.append(self._make_env())
        episodes = [Episode(self._envs[slot], self._codec, self._limits, session_id=f"{stream}/{slot}") for slot in range(len(wave))]
        live = {offset: list(range(offset, len(wave), self._config.groups)) for offset in range(self._config.groups)}
        pending: dict[int, list[Future[None]]] = {
            group: [self._pool.submit(episodes[slot].begin, tasks[wave[slot]], stream_seed("env", stream, slot)) for slot in slots]
            for group, slots in live.items()
        }
        for round_number in count():
            for group in [group for group, slots in live.items() if slots]:
                for future in pending[group]:
                    future.result()
                for slot in [slot for slot in live[group] if episodes[slot].done]:
                    live[group].remove(slot)
                    engine.end_session(episodes[slot].session_id)
                    on_end(wave[slot], episodes[slot].trajectory())
                active = live[group]
                if not active:
                    continue
                params = replace(self._params, seed=stream_seed("sample", stream, group, round_number))
                prompts = [episodes[slot].prompt_ids for slot in active]
                completions = engine.generate(prompts, params, session_ids=[episodes[slot].session_id for slot in active])
                pending[group] = [
                    self._pool.submit(episodes[slot].advance, completion) for slot, completion in zip(active, completions, strict=True)
                ]
            if not any(live.values()):
                return
