"""Host side of verification: run a task's frozen verifiers in a clone of the sandbox, as often as asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from t1_env.protocol import VerifierOutcome, VerifierReport, VerifierStatus
from t1_env.sandbox.base import CloneResult, Sandbox
from t1_env.tasks.task import Task
from t1_env.verifiers.clones import clone_payload, in_clone
from t1_env.verifiers.clones import literal_env as literal_env
from t1_env.verifiers.ids import RUNNER, source_of
from t1_env.verifiers.verbatim import run_verbatim

WORKER: Final = "t1_env.verifiers.worker"
"""The module that takes verdicts inside a clone."""

_MIN_TEST_TIMEOUT_S: Final = 10.0
_MESSAGE_CHARS: Final = 300


def run(
    sandbox: Sandbox,
    task: Task,
    ids: Sequence[str],
    *,
    timeout_s: float | None = None,
    retries: int = 1,
    env: Mapping[str, str] | None = None,
    workdir: str | None = None,
    confirm: bool = False,
    previous: VerifierReport | None = None,
) -> VerifierReport:
    """Run a task's verifiers in a clone of the sandbox as it stands.

    Args:
        sandbox: The sandbox to judge. It is frozen while the verifiers run and unchanged afterwards.
        task: The task.
        ids: The frozen list, from `collect`. Where it came from the task's own script, the script runs again.
        timeout_s: Limit for all verifiers together; default ``[verifier] timeout_sec`` of the task. One verifier may use a quarter of
            it, but at least 10 s, so that one that hangs leaves time for the others.
        retries: How often to try again when the machinery fails.
        env: Variables that building the environment set, as for `collect`.
        workdir: Working directory of the tests, as for `collect`.
        confirm: Whether to run everything a second time if a verifier passes that did not before. One of these that does not pass again
            does not count, and is named in ``flaky``.
        previous: The last report, for ``confirm``; without it every pass is new.

    Returns:
        A report with every id in the frozen order. If the machinery failed every time, ``infra_error`` says why and there are no
        outcomes.
    """
    report = _run_once(sandbox, task, ids, timeout_s=timeout_s, retries=retries, env=env, workdir=workdir)
    if not confirm or report.infra_error is not None:
        return report
    known = {} if previous is None else previous.as_bools()
    new = [name for name, passed in report.as_bools().items() if passed and not known.get(name)]
    if not new:
        return report
    again = _run_once(sandbox, task, ids, timeout_s=timeout_s, retries=retries, env=env, workdir=workdir)
    seconds = report.seconds + again.seconds
    if again.infra_error is not None:
        return VerifierReport(source=report.source, seconds=seconds, infra_error=again.infra_error)
    return replace(_without_flaky(report, again, new), seconds=seconds)


def _without_flaky(report: VerifierReport, again: VerifierReport, new: Sequence[str]) -> VerifierReport:
    """A report in which those of ``new`` do not count that did not pass again."""
    passes = again.as_bools()
    flaky = tuple(name for name in new if not passes.get(name))
    outcomes = dict(report.outcomes)
    for name in flaky:
        second = again.outcomes[name].message if name in again.outcomes else ""
        message = f"passed, then not again when it was confirmed: {second}"[:_MESSAGE_CHARS]
        outcomes[name] = VerifierOutcome(VerifierStatus.ERROR, outcomes[name].seconds, message)
    return replace(report, outcomes=MappingProxyType(outcomes), flaky=flaky)


def _run_once(
    sandbox: Sandbox,
    task: Task,
    ids: Sequence[str],
    *,
    timeout_s: float | None,
    retries: int,
    env: Mapping[str, str] | None,
    workdir: str | None,
) -> VerifierReport:
    if source_of(ids) != RUNNER:
        return _run_script(sandbox, task, ids, timeout_s=timeout_s, retries=retries, env=env, workdir=workdir)
    limit_s = task.config.verifier.timeout_sec if timeout_s is None else timeout_s
    payload = clone_payload(task, limit_s, env, workdir) | {"ids": list(ids), "test_timeout_s": time_for_one(limit_s)}
    result = in_clone(sandbox, payload, task, f"{WORKER}:run", retries=retries)
    return VerifierReport(seconds=result.seconds, infra_error=result.error) if result.error is not None else report_of(result, ids)


def _run_script(sandbox: Sandbox, task: Task, ids: Sequence[str], **settings: Any) -> VerifierReport:
    """Verdicts of a task without pytest tests: what its own script reports. What it does not report does not pass."""
    said = run_verbatim(sandbox, task, ids, **settings)
    if said.failed:
        return VerifierReport(source=source_of(ids), seconds=said.seconds, infra_error=said.problem)
    if said.report is not None:
        return said.report
    outcome = VerifierOutcome(VerifierStatus.ERROR, message=str(said.problem)[:_MESSAGE_CHARS])
    return VerifierReport(MappingProxyType(dict.fromkeys(ids, outcome)), source=source_of(ids), seconds=said.seconds)


def time_for_one(limit_s: float) -> float:
    """How long one verifier may take when all may take ``limit_s``."""
    return min(limit_s, max(_MIN_TEST_TIMEOUT_S, limit_s / 4))


def report_of(result: CloneResult, ids: Sequence[str]) -> VerifierReport:
    """The report on ``ids`` that a clone's answer amounts to; an id that it does not mention is missing."""
    outcomes = {name: _outcome(result.payload["outcomes"], name) for name in ids}
    return VerifierReport(
        outcomes=MappingProxyType(outcomes), source=RUNNER, seconds=result.seconds, unknown=tuple(result.payload["unknown"])
    )


def _outcome(outcomes: Mapping[str, Any], name: str) -> VerifierOutcome:
    if name not in outcomes:
        return VerifierOutcome(VerifierStatus.MISSING, message="the run did not report it")
    status, seconds, message = outcomes[name]
    return VerifierOutcome(VerifierStatus(status), float(seconds), str(message))
