"""The verifiers on the untouched environment: run only until it is known what they say about a task.

Every episode begins with the count that its reward is measured against. Taking it costs a clone, and a trainer resets the same task again
and again. The report of an earlier episode is used again if all of this holds:

- It was made in this process, for the same task digest, on the same backend chosen by name. The digest covers every file of the task, and
  so what is built, which tests run and under which limits.
- Every verifier passed or failed by itself. One that ended in an error may have run out of time on a busy machine, and a baseline too low
  would pay for what was there from the start.
- The Dockerfile has no ``RUN``: what is only copied is a function of the digest. With ``RUN``, whose commands may write a date or a random
  number, or without a Dockerfile, two environments that were built one after the other must have had the same verdicts.

That a verdict is a function of the files is assumed already where an unchanged filesystem is not verified again. Nothing of an agent is
in such a report: it is taken before the shell starts, and processes are not part of what verifiers see.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from t1_env.protocol import VerifierReport, VerifierStatus
from t1_env.sandbox.base import Sandbox
from t1_env.sandbox.dockerfile import parse_dockerfile
from t1_env.tasks.task import Task, read_text
from t1_env.verifiers.collecting import collect_and_run
from t1_env.verifiers.ids import FrozenIds

MAX_KEPT: Final = 4096
"""Reports kept; the oldest goes first."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A report, and how many more environments must confirm it before it is used again."""

    ids: FrozenIds
    report: VerifierReport
    to_confirm: int


_kept: dict[tuple[str, str], _Kept] = {}
_kept_lock = threading.Lock()


def baseline(
    sandbox: Sandbox,
    task: Task,
    *,
    backend: str | None,
    retries: int = 1,
    env: Mapping[str, str] | None = None,
    workdir: str | None = None,
) -> tuple[FrozenIds, VerifierReport]:
    """Freeze a task's verifiers and say which of them pass untouched.

    Args:
        sandbox: A started sandbox with the task's environment built and nothing done in it yet.
        task: The task.
        backend: Name of the sandbox's backend; None if it is the caller's own, whose reports are never used again.
        retries: How often to try again when the machinery fails.
        env: Variables that building the environment set.
        workdir: Working directory of the tests.

    Returns:
        The frozen ids and the report on them.

    Raises:
        TaskError: The verifiers cannot be collected.
        VerifierError: The machinery failed before they were.
    """
    key = (task.digest, backend) if backend is not None else None
    with _kept_lock:
        known = _kept.get(key) if key is not None else None
    if known is not None and known.to_confirm == 0:
        return known.ids, known.report
    ids, report = collect_and_run(sandbox, task, retries=retries, env=env, workdir=workdir)
    if key is not None and _is_decided(report):
        confirmed = known is not None and known.report.as_bools() == report.as_bools()
        with _kept_lock:
            while len(_kept) >= MAX_KEPT and key not in _kept:
                del _kept[next(iter(_kept))]
            _kept[key] = _Kept(ids, report, 0 if confirmed or not _runs_commands(task) else 1)
    return ids, report


def _is_decided(report: VerifierReport) -> bool:
    decided = (VerifierStatus.PASSED, VerifierStatus.FAILED)
    return report.infra_error is None and all(outcome.status in decided for outcome in report.outcomes.values())


def _runs_commands(task: Task) -> bool:
    path = task.environment_dir / "Dockerfile"
    if not path.is_file():
        return True  # an image by its name, which may mean another one tomorrow
    return any(instruction.keyword == "RUN" for instruction in parse_dockerfile(read_text(path), name=str(path)))
