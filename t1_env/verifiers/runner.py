"""Host side of verification: run a task's frozen verifiers in a clone of the sandbox, as often as asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from t1_env.protocol import VerifierOutcome, VerifierReport, VerifierStatus
from t1_env.sandbox.base import CloneResult, Sandbox
from t1_env.tasks.task import Task
from t1_env.verifiers.classes import SERVICE, classes_of
from t1_env.verifiers.clones import clone_payload, in_clone, view_of
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

    Where the agent changed the base system, they run in a second clone without that, and only what passes in both counts. Verifiers of
    the class ``service`` run in a clone of their own beside which the agent's processes go on.

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
    order = _Order(sandbox, task, ids, timeout_s, retries, env, workdir)
    report = _in_both_views(order)
    if not confirm or report.infra_error is not None:
        return report
    known = {} if previous is None else previous.as_bools()
    new = [name for name, passed in report.as_bools().items() if passed and not known.get(name)]
    if not new:
        return report
    again = _in_both_views(order)
    seconds = report.seconds + again.seconds
    if again.infra_error is not None:
        return replace(again, seconds=seconds)
    flaky = tuple(name for name in new if not again.as_bools().get(name))
    report = _demote(report, again, flaky, VerifierStatus.ERROR, "passed, then not again when it was confirmed")
    return replace(report, seconds=seconds, flaky=flaky)


@dataclass(frozen=True, slots=True)
class _Order:
    """Arguments of `run`."""

    sandbox: Sandbox
    task: Task
    ids: Sequence[str]
    timeout_s: float | None
    retries: int
    env: Mapping[str, str] | None
    workdir: str | None


def _in_both_views(order: _Order) -> VerifierReport:
    """Run the verifiers; where the agent changed the base system, once more without that, and only what passes both times counts."""
    report = _run_once(order, restored=False)
    if report.infra_error is not None or not report.masked or not report.passed:
        return report
    again = _run_once(order, restored=True)
    seconds = report.seconds + again.seconds
    if again.infra_error is not None:
        return replace(again, seconds=seconds)
    lost = [name for name, passed in report.as_bools().items() if passed and not again.as_bools().get(name)]
    report = _demote(report, again, lost, VerifierStatus.FAILED, "passes only with the agent's changes to the base system")
    return replace(report, seconds=seconds, tainted=tuple(name for name in order.ids if name in {*report.tainted, *again.tainted}))


def _demote(report: VerifierReport, again: VerifierReport, lost: Sequence[str], status: VerifierStatus, why: str) -> VerifierReport:
    """A report in which some passes do not count, because of what another run said."""
    outcomes = dict(report.outcomes)
    for name in lost:
        said = again.outcomes[name].message if name in again.outcomes else ""
        outcomes[name] = VerifierOutcome(status, outcomes[name].seconds, f"{why}: {said}".removesuffix(": ")[:_MESSAGE_CHARS])
    return replace(report, outcomes=MappingProxyType(outcomes), tainted=tuple(name for name in report.tainted if name not in lost))


def _run_once(order: _Order, *, restored: bool) -> VerifierReport:
    """One run in one view. What needs the agent's live processes runs apart from what needs them to stand still."""
    if source_of(order.ids) != RUNNER:
        return _run_script(order, restored=restored)
    live = [name for name, kind in classes_of(order.task, order.ids).items() if kind == SERVICE]
    still = [name for name in order.ids if name not in live]
    report = VerifierReport()
    for ids, is_live in ((still, False), (live, True)):
        if not ids:
            continue
        part = _run_pytest(order, ids, restored=restored, live=is_live)
        if part.infra_error is not None:
            return replace(part, seconds=report.seconds + part.seconds)
        report = _joined(report, part)
    outcomes = {name: report.outcomes[name] for name in order.ids}
    return replace(report, outcomes=MappingProxyType(outcomes))


def _joined(first: VerifierReport, second: VerifierReport) -> VerifierReport:
    return VerifierReport(
        outcomes={**first.outcomes, **second.outcomes},
        source=RUNNER,
        seconds=first.seconds + second.seconds,
        unknown=tuple(sorted({*first.unknown, *second.unknown})),
        tainted=(*first.tainted, *second.tainted),
        masked=tuple(sorted({*first.masked, *second.masked})),
    )


def _run_pytest(order: _Order, ids: Sequence[str], *, restored: bool, live: bool) -> VerifierReport:
    limit_s = order.task.config.verifier.timeout_sec if order.timeout_s is None else order.timeout_s
    payload = clone_payload(order.task, limit_s, order.env, order.workdir)
    payload |= {"ids": list(ids), "known": list(order.ids), "test_timeout_s": time_for_one(limit_s)}
    view = view_of(order.sandbox, order.task, order.env, live=live)
    if view is not None:
        view = replace(view, restored=restored)
    result = in_clone(order.sandbox, payload, order.task, f"{WORKER}:run", retries=order.retries, view=view)
    return VerifierReport(seconds=result.seconds, infra_error=result.error) if result.error is not None else report_of(result, ids)


def _run_script(order: _Order, *, restored: bool) -> VerifierReport:
    """Verdicts of a task without pytest tests: what its own script reports. What it does not report does not pass."""
    said = run_verbatim(
        order.sandbox,
        order.task,
        order.ids,
        timeout_s=order.timeout_s,
        retries=order.retries,
        env=order.env,
        workdir=order.workdir,
        restored=restored,
    )
    source = source_of(order.ids)
    if said.failed:
        return VerifierReport(source=source, seconds=said.seconds, infra_error=said.problem)
    if said.report is not None:
        return said.report
    outcome = VerifierOutcome(VerifierStatus.ERROR, message=str(said.problem)[:_MESSAGE_CHARS])
    return VerifierReport(MappingProxyType(dict.fromkeys(order.ids, outcome)), source=source, seconds=said.seconds)


def time_for_one(limit_s: float) -> float:
    """How long one verifier may take when all may take ``limit_s``."""
    return min(limit_s, max(_MIN_TEST_TIMEOUT_S, limit_s / 4))


def report_of(result: CloneResult, ids: Sequence[str]) -> VerifierReport:
    """The report on ``ids`` that a clone's answer amounts to; an id that it does not mention is missing."""
    outcomes = {name: _outcome(result.payload["outcomes"], name) for name in ids}
    return VerifierReport(
        outcomes=MappingProxyType(outcomes),
        source=RUNNER,
        seconds=result.seconds,
        unknown=tuple(result.payload["unknown"]),
        tainted=tuple(result.payload.get("tainted", ())),
        masked=result.masked,
    )


def _outcome(outcomes: Mapping[str, Any], name: str) -> VerifierOutcome:
    if name not in outcomes:
        return VerifierOutcome(VerifierStatus.MISSING, message="the run did not report it")
    status, seconds, message = outcomes[name]
    return VerifierOutcome(VerifierStatus(status), float(seconds), str(message))
