"""The task's own test script: a second opinion at the end of an episode, and the only one where a task has no pytest tests.

The fast runner pays during the episode; the script is what the task's author wrote. It runs word for word in a clone, its results are
read from the best source it leaves, and where the two disagree the lower count is paid and the disagreement is reported.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from xml.etree import ElementTree

from t1_env.protocol import VerbatimVerdict, VerifierOutcome, VerifierReport, VerifierStatus
from t1_env.sandbox.base import Sandbox
from t1_env.tasks.task import Task
from t1_env.verifiers.classes import needs_live_processes
from t1_env.verifiers.clones import TESTS_MOUNT, clone_payload, in_clone, view_of
from t1_env.verifiers.ids import source_of

_ENTRY: Final = "t1_env.verifiers.verbatim_worker:run_script"
_SHORT_SUMMARY: Final = re.compile(r"^(PASSED|FAILED|ERROR|XFAIL|XPASS) (\S.*?)(?: - .*)?$", re.MULTILINE)
_SCALAR: Final = "reward"
_OUTPUT_KEPT: Final = 4000
_OUTSIDE_TESTS: Final = "/.t1-script"
"""Where a script is mounted that does not lie in the tests directory."""


@dataclass(frozen=True, slots=True)
class Script:
    """The test script of a task.

    Args:
        path: On the host.
        inside: Where a clone finds it.
        env: What it expects in its environment.
    """

    path: Path
    inside: str
    env: Mapping[str, str]

    @property
    def mounts(self) -> dict[str, Path]:
        """What must be mounted beside the tests for it."""
        return {} if self.inside.startswith(f"{TESTS_MOUNT}/") else {self.inside: self.path}


def script_of(task: Task) -> Script | None:
    """The test script of a task: Harbor's ``tests/test.sh``, or ``run-tests.sh`` of Terminal-Bench 1, beside the tests or among them."""
    candidates = (task.tests_dir / "test.sh", task.tests_dir / "run-tests.sh", task.path / "run-tests.sh")
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        return None
    env = {} if path.name == "test.sh" else {"TEST_DIR": TESTS_MOUNT, "T_BENCH_TEST_DIR": TESTS_MOUNT}
    return Script(path, f"{TESTS_MOUNT if path.parent == task.tests_dir else _OUTSIDE_TESTS}/{path.name}", env)


@dataclass(frozen=True, slots=True)
class VerbatimResult:
    """What the task's script said.

    Args:
        report: Its verdicts over the frozen ids, or over the single id ``"reward"`` when it left only a number; None without a verdict.
        problem: Why there is no verdict, else None.
        exit_code: Exit status of the script, None if it did not run to its end.
        output: The last part of what it printed.
        failed: Whether it was the machinery that failed.
        seconds: Wall time, clone included.
    """

    report: VerifierReport | None
    problem: str | None = None
    exit_code: int | None = None
    output: str = ""
    failed: bool = False
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Settlement:
    """The fast runner's report and the script's, settled.

    Args:
        report: The report to pay.
        agrees: Whether both say the same; None when there was no second opinion.
        differences: One line for each disagreement.
        note: Why there was no second opinion, else empty.
        source: Where the script's verdicts were read; empty without any.
        failed: Whether there is no second opinion because the machinery failed.
    """

    report: VerifierReport
    agrees: bool | None
    differences: tuple[str, ...] = ()
    note: str = ""
    source: str = ""
    failed: bool = False

    @property
    def verdict(self) -> VerbatimVerdict:
        """The settlement in a word."""
        if self.agrees is None:
            return VerbatimVerdict.INFRA_FAILURE if self.failed else VerbatimVerdict.NO_VERDICT
        return VerbatimVerdict.AGREES if self.agrees else VerbatimVerdict.DISAGREES


def run_verbatim(
    sandbox: Sandbox,
    task: Task,
    ids: Sequence[str] | None,
    *,
    timeout_s: float | None = None,
    retries: int = 1,
    env: Mapping[str, str] | None = None,
    workdir: str | None = None,
    restored: bool = False,
) -> VerbatimResult:
    """Run the task's test script in a clone of the sandbox as it stands.

    Args:
        sandbox: The sandbox to judge; unchanged afterwards.
        task: The task.
        ids: The frozen list of verifiers; None to take whatever the script reports.
        timeout_s: Limit for the script; default ``[verifier] timeout_sec``.
        retries: How often to try again when the machinery fails.
        env: Variables that building the environment set (Dockerfile ``ENV``).
        workdir: Working directory of the script; default the task's.
        restored: Whether it is to find the base system as it was before the agent changed it (``CloneView.restored``).

    Returns:
        The verdict, or the reason why there is none. Never raises for a failure of the machinery.
    """
    script = script_of(task)
    if script is None:
        return VerbatimResult(None, problem="the task ships no tests/test.sh")
    limit_s = task.config.verifier.timeout_sec if timeout_s is None else timeout_s
    payload = clone_payload(task, limit_s, {**script.env, **(env or {})}, workdir) | {"script": script.inside}
    view = view_of(sandbox, task, env, live=needs_live_processes(task, ids or ()))
    if view is not None:
        view = dataclasses.replace(view, restored=restored)
    result = in_clone(sandbox, payload, task, _ENTRY, retries=retries, limit_s=limit_s, mounts=script.mounts, view=view)
    if result.error is not None:
        return VerbatimResult(None, problem=result.error, failed=True, seconds=result.seconds)
    answer = result.payload
    output = str(answer["output"])
    report = None if answer["problem"] else parse_results(answer["files"], output, ids, seconds=result.seconds)
    if report is not None:
        report = dataclasses.replace(report, masked=result.masked)
    problem = answer["problem"] or (None if report else f"{script.path.name} left no result that can be read")
    return VerbatimResult(report, problem, answer["exit_code"], output[-_OUTPUT_KEPT:], seconds=result.seconds)


def settle(fast: VerifierReport, verbatim: VerbatimResult) -> Settlement:
    """Compare the two opinions and choose what is paid: the lower count.

    A script that leaves only a number is compared on whether everything passes. If it says no where the fast runner says yes, nothing is
    paid, because nothing is known about the single verifiers.

    Args:
        fast: The last report of the fast runner, on the same state.
        verbatim: The script's verdict.
    """
    other = verbatim.report
    if other is None or fast.infra_error is not None:
        return Settlement(
            fast, None, note=verbatim.problem or fast.infra_error or "", failed=verbatim.failed or fast.infra_error is not None
        )
    if set(other.outcomes) != set(fast.outcomes):
        if other.solved == fast.solved:
            return Settlement(fast, True, source=other.source)
        difference = f"all verifiers pass: runner {fast.solved}, {other.source} {other.solved}"
        return Settlement(_none_passed(fast, other.source) if fast.solved else fast, False, (difference,), source=other.source)
    mine, theirs = fast.as_bools(), other.as_bools()
    differences = tuple(
        f"{name}: runner {'passed' if mine[name] else 'did not pass'}, {other.source} {other.outcomes[name].status.value}"
        for name in mine
        if mine[name] != theirs[name]
    )
    return Settlement(other if other.passed < fast.passed else fast, not differences, differences, source=other.source)


def parse_results(files: Mapping[str, str], output: str, ids: Sequence[str] | None, *, seconds: float = 0.0) -> VerifierReport | None:
    """Read the best source a test script left: CTRF, JUnit XML, pytest's ``-rA`` lines, ``reward.json``, ``reward.txt``.

    Args:
        files: Name -> text of the files in ``/logs/verifier``.
        output: What the script printed.
        ids: The frozen list of verifiers; None to take whatever is reported.
        seconds: Wall time to note in the report.

    Returns:
        A report over ``ids`` (over ``("reward",)`` or the keys of ``reward.json`` when single tests are not named, unless ``ids`` are
        such keys), or None if there is nothing to read.
    """
    for source, statuses in (
        ("ctrf", _ctrf(files.get("ctrf.json", ""))),
        ("junit", _junit(files.get("junit.xml") or files.get("results.xml") or "")),
        ("pytest", _summary_lines(output)),
    ):
        if statuses:
            return _over_frozen_ids(statuses, ids, source, seconds)
    for source, scores in (
        ("reward.json", _reward_json(files.get("reward.json", ""))),
        ("reward.txt", _reward_text(files.get("reward.txt"))),
    ):
        if scores:
            verdicts = {name: _status(value >= 1.0) for name, value in scores.items()}
            if source_of(ids or ()) not in _SCORES:
                return _report(verdicts, source, seconds)
            return _over_frozen_ids(list(verdicts.items()), ids, source, seconds)
    return None


# ---------------------------------------------------------------------------------------------------------------------- sources
Statuses = list[tuple[str, VerifierStatus]]
_SCORES: Final = ("reward.json", "reward.txt")
"""Sources that hold numbers rather than tests."""


def _ctrf(text: str) -> Statuses:
    try:
        tests = json.loads(text)["results"]["tests"]
        return [(str(test["name"]), _status(test["status"] == "passed")) for test in tests]
    except (ValueError, KeyError, TypeError):
        return []


def _junit(text: str) -> Statuses:
    if "<testcase" not in text or "<!DOCTYPE" in text:  # no entity tricks: the file comes from beside the agent's code
        return []
    try:
        cases = list(ElementTree.fromstring(text).iter("testcase"))
    except ElementTree.ParseError:
        return []
    # pytest writes the dotted module (and class) as classname: test_outputs.TestA -> test_outputs.py::TestA::name
    return [(_junit_id(case.get("classname", ""), case.get("name", "")), _status(not [e for e in case if e.tag in _BAD])) for case in cases]


_BAD: Final = ("failure", "error", "skipped")


def _junit_id(classname: str, name: str) -> str:
    parts = classname.split(".")
    classes = [part for part in parts if part[:1].isupper()]
    module = "/".join(part for part in parts if not part[:1].isupper())
    return "::".join([f"{module}.py", *classes, name])


def _summary_lines(output: str) -> Statuses:
    return [(name, _status(word == "PASSED")) for word, name in _SHORT_SUMMARY.findall(output) if "::" in name]


def _reward_json(text: str) -> dict[str, float]:
    """The scores in ``reward.json``; none if anything but finite numbers is in it, as Harbor has it."""
    try:
        value: Any = json.loads(text)
        if isinstance(value, int | float):
            value = {_SCALAR: value}
        scores = {str(name): float(score) for name, score in value.items() if not isinstance(score, str)}
        return scores if len(scores) == len(value) and all(map(math.isfinite, scores.values())) else {}
    except (ValueError, TypeError, AttributeError, OverflowError):
        return {}


def _reward_text(text: str | None) -> dict[str, float]:
    try:
        score = float(text or "")
    except ValueError:
        return {}
    return {_SCALAR: score} if math.isfinite(score) else {}


def _status(passed: bool) -> VerifierStatus:
    return VerifierStatus.PASSED if passed else VerifierStatus.FAILED


def _over_frozen_ids(statuses: Statuses, ids: Sequence[str] | None, source: str, seconds: float) -> VerifierReport:
    """Bring reported names onto the frozen ids. A name may carry more directories than the id; a name reported twice does not pass."""
    ids = list(dict.fromkeys(name for name, _ in statuses)) if ids is None else ids
    found: dict[str, VerifierStatus] = {}
    unknown = []
    for name, status in statuses:
        matching = [frozen for frozen in ids if name == frozen or ("::" in frozen and name.endswith(f"/{frozen}"))]
        if not matching:
            unknown.append(name)
        for frozen in matching:
            found[frozen] = VerifierStatus.ERROR if frozen in found else status
    verdicts = {frozen: found.get(frozen, VerifierStatus.MISSING) for frozen in ids}
    return _report(verdicts, source, seconds, unknown)


def _report(verdicts: Mapping[str, VerifierStatus], source: str, seconds: float, unknown: Iterable[str] = ()) -> VerifierReport:
    outcomes = MappingProxyType({name: VerifierOutcome(status) for name, status in verdicts.items()})
    return VerifierReport(outcomes=outcomes, source=source, seconds=seconds, unknown=tuple(unknown))


def _none_passed(report: VerifierReport, source: str) -> VerifierReport:
    outcome = VerifierOutcome(VerifierStatus.FAILED, message=f"{source} says that not everything passes")
    return VerifierReport(outcomes=MappingProxyType(dict.fromkeys(report.outcomes, outcome)), source=source, seconds=report.seconds)
