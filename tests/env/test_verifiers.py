"""Host side of verification: what is asked of the clone and what its answers become."""

import os
import subprocess
import sys

import pytest

from t1_env.errors import SandboxDied, TaskError, VerifierError
from t1_env.protocol import VerifierStatus
from t1_env.sandbox.base import CloneResult
from t1_env.tasks.schema import T1Metadata, TaskConfig
from t1_env.tasks.task import Task
from t1_env.verifiers import collect, ids_digest, run


class ScriptedClone:
    """Answers ``run_in_clone`` from a list and keeps what it was asked."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.calls = []

    def run_in_clone(self, entry, payload, *, mounts=None, timeout_s=60.0):
        self.calls.append((entry, payload, mounts, timeout_s))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return CloneResult(None, 0.5, answer) if isinstance(answer, str) else CloneResult(answer, 0.25)


@pytest.fixture
def task(tmp_path):
    (tmp_path / "tests").mkdir()
    config = TaskConfig.model_validate({"verifier": {"timeout_sec": 100.0, "env": {"A": "1", "KEY": "${HOST_SECRET}"}}})
    return Task("seeds/x", tmp_path, "do", config, T1Metadata(), digest=os.fspath(tmp_path), workdir="/app")


def listing(*ids, errors=()):
    return {"ids": list(ids), "errors": list(errors)}


def test_collect_asks_once_per_digest(task):
    sandbox = ScriptedClone(listing("a.py::x", "a.py::y"))
    assert collect(sandbox, task) == ("a.py::x", "a.py::y")
    assert collect(sandbox, task) == ("a.py::x", "a.py::y")
    ((entry, payload, mounts, timeout_s),) = sandbox.calls
    assert entry == "t1_env.verifiers.worker:collect"
    assert mounts == {"/tests": task.tests_dir}
    assert payload["tests_dir"] == "/tests"
    assert payload["workdir"] == "/app"
    assert payload["env"] == {"A": "1"}
    assert timeout_s > payload["timeout_s"] == 100.0


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (listing(), "no test found"),
        (listing("a.py::x", errors=["b.py: SyntaxError"]), "b.py: SyntaxError"),
        (listing("a.py::x", "a.py::x"), "a.py::x names more than one test"),
    ],
)
def test_collect_refuses_tests_that_cannot_be_frozen_and_does_not_remember(task, answer, message):
    sandbox = ScriptedClone(answer, listing("a.py::x"))
    with pytest.raises(TaskError, match=message):
        collect(sandbox, task)
    assert collect(sandbox, task) == ("a.py::x",)


def test_collect_without_tests_directory(task):
    task.tests_dir.rmdir()
    with pytest.raises(TaskError, match="no tests directory"):
        collect(ScriptedClone(), task)


def test_collect_retries_once_then_blames_the_machinery(task):
    with pytest.raises(VerifierError, match="second"):
        collect(ScriptedClone("first", "second"), task)
    assert collect(ScriptedClone("first", listing("a.py::x")), task) == ("a.py::x",)


def test_run_keeps_the_frozen_order_and_every_id(task):
    answer = {"outcomes": {"b": ["passed", 0.1, ""], "a": ["failed", 0.2, "why"]}, "unknown": ["z"], "errors": [], "runners": 1}
    sandbox = ScriptedClone(answer)
    report = run(sandbox, task, ("a", "b", "c"))
    assert list(report.outcomes) == ["a", "b", "c"]
    assert [outcome.status for outcome in report.outcomes.values()] == [
        VerifierStatus.FAILED,
        VerifierStatus.PASSED,
        VerifierStatus.MISSING,
    ]
    assert (report.passed, report.total, report.unknown, report.source, report.infra_error) == (1, 3, ("z",), "runner", None)
    assert sandbox.calls[0][1]["ids"] == ["a", "b", "c"]
    assert sandbox.calls[0][1]["test_timeout_s"] == 25.0


def test_run_with_a_time_limit_and_variables_of_its_own(task):
    sandbox = ScriptedClone({"outcomes": {}, "unknown": []})
    run(sandbox, task, ("a",), timeout_s=4.0, env={"A": "from the image", "B": "2"})
    assert sandbox.calls[0][1]["env"] == {"A": "1", "B": "2"}
    assert (sandbox.calls[0][1]["timeout_s"], sandbox.calls[0][1]["test_timeout_s"]) == (4.0, 4.0)


def test_run_retries_once_and_a_failure_of_the_machinery_is_never_a_verdict(task):
    good = {"outcomes": {"a": ["passed", 0.1, ""]}, "unknown": []}
    assert run(ScriptedClone("clone failed", good), task, ("a",)).solved
    report = run(ScriptedClone("clone failed", "again"), task, ("a",))
    assert report.infra_error == "again"
    assert report.total == 0
    assert not report.solved
    assert report.seconds == 1.0


def test_run_does_not_retry_on_a_dead_sandbox(task):
    sandbox = ScriptedClone(SandboxDied("gone"))
    assert "gone" in run(sandbox, task, ("a",)).infra_error
    assert len(sandbox.calls) == 1


def test_ids_digest_depends_on_order_and_names():
    assert ids_digest(("a", "b")) != ids_digest(("b", "a"))
    assert ids_digest(("a", "b")) == ids_digest(["a", "b"])


def test_the_package_is_light_to_import():
    code = "import sys, t1_env.verifiers; print([m for m in ('pytest', '_pytest', 'pydantic') if m in sys.modules])"
    bare = "import sys, types, pathlib; p = types.ModuleType('t1_env'); p.__path__ = [sys.argv[1]]; sys.modules['t1_env'] = p; "
    import t1_env

    out = subprocess.run([sys.executable, "-c", bare + code, next(iter(t1_env.__path__))], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
