"""Does the fast road say, verifier by verifier, what each task's own script says? Asked of the whole corpus."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Final

from t1_env.bench.catalogue import Benchmark, Settings
from t1_env.bench.figures import FigureSpec, at_least, mean
from t1_env.bench.measure import Measured, MeasurementError, Role, Series, Tick
from t1_env.env import TerminalEnv
from t1_env.protocol import Action, Submit, VerbatimVerdict
from t1_env.tasks import Task, list_tasks, resolve_tasks
from t1_env.testing import oracle_actions, rollout

logger = logging.getLogger(__name__)

AGENTS: Final = ("oracle", "no-op", "half-oracle")
SINGLE_TESTS: Final = frozenset({"ctrf", "junit", "pytest"})
"""Sources that name single tests, so that the comparison is vector for vector."""


def benchmark(settings: Settings) -> Benchmark:
    """Return the comparison as a benchmark; what disagrees is logged as it is found.

    Args:
        settings: ``fraction`` is the share of the corpus that is played, evenly spread.
    """

    def run(tick: Tick) -> Measured:
        measured = {agent: Series(Role.OURS, "share") for agent in ("all", *AGENTS)}
        names = list_tasks()
        chosen = names[:: max(1, round(1 / settings.fraction))]
        for done, name in enumerate(chosen):
            agreed = []
            for agent, problem in compare(resolve_tasks(name).sample(0)):
                agreed.append(float(problem is None))
                measured[agent].blocks.append((agreed[-1],))
                if problem is not None:
                    logger.warning("%s, %s: %s", name, agent, problem)
            measured["all"].blocks.append(tuple(agreed))
            tick((done + 1) / len(chosen))
        return measured

    definition = (
        "Share of episodes at whose end the task's own `test.sh`, run word for word, says of every single verifier what the fast road "
        "says: every hand-written task and one instance of each level of each family, with the oracle, an agent that does nothing, and "
        "the first half of the oracle."
    )
    return Benchmark(
        "local-verify-conformance",
        "fast road and test.sh, verifier by verifier",
        (FigureSpec("local-verify-conformance", "local: fast = verbatim", definition, "share", mean("all"), "all", at_least(1.0)),),
        run,
    )


def compare(task: Task) -> Iterator[tuple[str, str | None]]:
    """Play a task with each agent.

    Args:
        task: The task.

    Yields:
        The agent, and how the two disagree or None.

    Raises:
        MeasurementError: The machinery failed.
    """
    env = TerminalEnv(task, verify="end", max_turns=10_000, end_on_solved=False)
    try:
        for agent, actions in scripts(task).items():
            episode = rollout(env, actions, seed=0)
            info = episode.infos[-1]
            if episode.infra_failure:
                raise MeasurementError(f"{task.id}, {agent}: the machinery failed: {info['infra_error']}")
            said = info["verbatim"]
            if said["verdict"] != VerbatimVerdict.AGREES:
                yield agent, f"test.sh {said['verdict']}: {said['note']}"
            elif said["source"] not in SINGLE_TESTS:
                yield agent, f"test.sh names no single tests: it left {said['source']}"
            else:
                yield agent, None
    finally:
        env.close()


def scripts(task: Task) -> Mapping[str, list[Action]]:
    """Return what each agent does; all of them submit in the end."""
    steps = oracle_actions(task)
    return {"oracle": [*steps, Submit()], "no-op": [Submit()], "half-oracle": [*steps[: len(steps) // 2], Submit()]}
