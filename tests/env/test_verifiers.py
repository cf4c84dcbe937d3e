"""Host side of verification: what is asked of the clone and what its answers become."""

import os
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest

from t1_env.errors import SandboxDied, TaskError, VerifierError
from t1_env.protocol import VerifierStatus
from t1_env.sandbox.base import CloneResult
from t1_env.tasks.schema import T1Metadata, TaskConfig
from t1_env.tasks.task import Task
from t1_env.verifiers import FrozenIds, collect, collect_and_run, ids_digest, run
from t1_env.verifiers import baseline as baseline_module
from t1_env.verifiers.baseline import baseline


class ScriptedClone:
    """Answers ``run_in_clone`` from a list and keeps what it was asked."""

    def __init__(self, *answers, capabilities=(), masked=()):
        self.answers = list(answers)
        self.calls = []
        self.views = []
        self.capabilities = frozenset(capabilities)
        self.masked = masked

    def run_in_clone(self, entry, payload, *, mounts=None, timeout_s=60.0, **view):
        self.calls.append((entry, payload, mounts, timeout_s))
        self.views.append(view.get("view"))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        masked = self.masked if "view" in view else ()
        return CloneResult(None, 0.5, answer, masked) if isinstance(answer, str) else CloneResult(answer, 0.25, None, masked)


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


# -------------------------------------------------------------------------------------------- lists that the runner cannot collect
def script_says(**files):
    return {"problem": None, "files": files, "output": "", "exit_code": 0}


def with_file(task, name, text=""):
    (task.path / name).parent.mkdir(exist_ok=True)
    (task.path / name).write_text(text)


def test_tests_that_import_the_agents_work_are_listed_behind_the_oracle(task):
    with_file(task, "solution/solve.sh")
    sandbox = ScriptedClone(listing(errors=["a.py: No module named 'solution'"]), listing("a.py::x"))
    ids = collect(sandbox, task)
    assert (ids, ids.source, ids.digest) == (("a.py::x",), "runner", ids_digest(["a.py::x"]))
    entry, payload, mounts, timeout_s = sandbox.calls[1]
    assert entry == "t1_env.verifiers.worker:collect_solved"
    assert payload["solution"] == "/solution/solve.sh"
    assert mounts == {"/tests": task.tests_dir, "/solution": task.path / "solution"}
    assert timeout_s > 200
    assert collect(sandbox, task) is ids


def test_an_oracle_that_does_not_help_leaves_the_first_reason(task):
    with_file(task, "solution/solve.sh")
    with_file(task, "tests/test.sh")  # which would find no more than the runner
    with pytest.raises(TaskError, match="numpy"):
        collect(ScriptedClone(listing(errors=["a.py: No module named 'numpy'"]), listing(errors=["a.py: other"])), task)
    with pytest.raises(VerifierError, match="second"):
        collect(ScriptedClone(listing(errors=["a.py: No module named 'numpy'"]), "first", "second"), task)


@pytest.mark.parametrize(
    ("said", "source", "expected"),
    [
        ({"reward.json": '{"speed": 0.25, "size": 1}'}, "reward.json", ("speed", "size")),
        ({"reward.txt": "0"}, "reward.txt", ("reward",)),
        ({"ctrf.json": '{"results": {"tests": [{"name": "suite works", "status": "failed"}]}}'}, "ctrf", ("suite works",)),
    ],
)
def test_a_task_without_pytest_tests_has_what_its_script_reports(task, said, source, expected):
    with_file(task, "tests/test.sh")
    sandbox = ScriptedClone({**listing(), "outcomes": None}, script_says(**said), script_says(**said))
    ids, report = collect_and_run(sandbox, task, env={"B": "2"}, workdir="/srv")
    assert (ids, ids.source, report.source, tuple(report.outcomes)) == (expected, source, source, expected)
    assert [entry.rpartition(":")[2] for entry, *_ in sandbox.calls] == ["collect_and_run", "run_script", "run_script"]
    for _, payload, mounts, _ in sandbox.calls:
        assert (payload["env"], payload["workdir"], mounts) == ({"A": "1", "B": "2"}, "/srv", {"/tests": task.tests_dir})


def test_a_script_that_reports_nothing_leaves_the_first_reason(task):
    with_file(task, "tests/test.sh")
    with pytest.raises(TaskError, match="no test found"):
        collect(ScriptedClone(listing(), script_says()), task)
    with pytest.raises(VerifierError, match="second"):
        collect(ScriptedClone(listing(), "first", "second"), task)


def test_verdicts_of_a_script_are_brought_onto_the_frozen_list(task):
    with_file(task, "tests/test.sh")
    ids = FrozenIds(("speed", "size"), "reward.json")
    report = run(ScriptedClone(script_says(**{"reward.json": '{"size": 1, "speed": 0.5, "style": 1}'})), task, ids)
    assert (report.as_bools(), report.unknown) == ({"speed": False, "size": True}, ("style",))
    report = run(ScriptedClone({**script_says(), "problem": "test.sh did not end within 5 s"}), task, ids)
    assert {outcome.status for outcome in report.outcomes.values()} == {VerifierStatus.ERROR}
    assert report.infra_error is None
    assert "did not end" in report.outcomes["speed"].message
    report = run(ScriptedClone("first", "second"), task, ids)
    assert (report.infra_error, report.total) == ("second", 0)


def test_a_frozen_list_knows_where_it_came_from():
    ids = FrozenIds(("b", "a"), "ctrf")
    again = pickle.loads(pickle.dumps(ids))
    assert (again, again.source, again.digest) == (("b", "a"), "ctrf", ids_digest(("b", "a")))
    assert FrozenIds(("a",)).source == "runner"


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


# --------------------------------------------------------------------------------------------------------------------- views
TAMPERED = {"capabilities": ("clone", "views", "live"), "masked": ("/usr/bin/git",)}


def test_a_sandbox_that_offers_no_views_is_asked_for_none(task):
    sandbox = ScriptedClone(answer(a="passed"), capabilities=("clone",))
    assert run(sandbox, task, ("a",)).passed == 1
    assert sandbox.views == [None]


def test_an_untouched_base_system_is_looked_at_once(task):
    sandbox = ScriptedClone(answer(a="passed"), capabilities=("views",))
    task = replace(task, metadata=T1Metadata(writable=("/usr/local",)))
    report = run(sandbox, task, ("a",), env={"PATH": "/opt/bin:relative:/usr/bin", "HOME": "/home/me"})
    (view,) = sandbox.views
    assert (view.restored, view.live, view.search_path, view.home) == (False, False, ("/opt/bin", "/usr/bin"), "/home/me")
    assert (view.writable, report.masked, report.passed) == (("/usr/local",), (), 1)


def test_with_a_changed_base_system_only_what_passes_without_the_change_counts(task):
    sandbox = ScriptedClone(answer(a="passed", b="passed", c="failed"), answer(a="passed", b="failed", c="passed"), **TAMPERED)
    report = run(sandbox, task, tuple("abc"))
    assert report.as_bools() == {"a": True, "b": False, "c": False}
    assert report.outcomes["b"].status is VerifierStatus.FAILED
    assert "changes to the base system" in report.outcomes["b"].message
    assert (report.masked, report.seconds) == (("/usr/bin/git",), 0.5)
    assert [view.restored for view in sandbox.views] == [False, True]


def test_where_nothing_passes_there_is_nothing_to_check(task):
    sandbox = ScriptedClone(answer(a="failed"), **TAMPERED)
    report = run(sandbox, task, ("a",))
    assert (report.passed, report.masked, len(sandbox.calls)) == (0, ("/usr/bin/git",), 1)


def test_a_second_view_that_cannot_be_had_is_no_verdict(task):
    report = run(ScriptedClone(answer(a="passed"), "first", "second", **TAMPERED), task, ("a",))
    assert (report.infra_error, report.total, report.seconds) == ("second", 0, 1.25)


def test_both_views_are_confirmed(task):
    sandbox = ScriptedClone(*[answer(a="passed", b="passed")] * 3, answer(a="passed", b="failed"), **TAMPERED)
    report = run(sandbox, task, ("a", "b"), confirm=True)
    assert (report.as_bools(), report.flaky, len(sandbox.calls)) == ({"a": True, "b": False}, ("b",), 4)


def test_a_script_is_run_in_both_views_too(task):
    with_file(task, "tests/test.sh")
    said = [script_says(**{"reward.json": text}) for text in ('{"a": 1, "b": 1}', '{"a": 1, "b": 0}')]
    sandbox = ScriptedClone(*said, **TAMPERED)
    report = run(sandbox, task, FrozenIds(("a", "b"), "reward.json"))
    assert (report.as_bools(), report.masked) == ({"a": True, "b": False}, ("/usr/bin/git",))


def test_what_needs_live_processes_runs_beside_them(task):
    task = replace(task, metadata=T1Metadata(classes={"b": "service", "a": "pure", "c": "exec"}))
    first = {**answer(a="passed", c="failed"), "unknown": ["z"]}
    sandbox = ScriptedClone(first, answer(b="passed"), capabilities=("live",))
    report = run(sandbox, task, tuple("abc"))
    assert (list(report.as_bools().items()), report.unknown) == ([("a", True), ("b", True), ("c", False)], ("z",))
    assert [(call[1]["ids"], call[1]["known"]) for call in sandbox.calls] == [(["a", "c"], list("abc")), (["b"], list("abc"))]
    assert [view.live for view in sandbox.views] == [False, True]
    broken = run(ScriptedClone(first, "first", "second", capabilities=("live",)), task, tuple("abc"))
    assert (broken.infra_error, broken.seconds) == ("second", 1.25)


def test_a_script_for_live_processes_runs_beside_them(task):
    with_file(task, "tests/test.sh")
    task = replace(task, metadata=T1Metadata(classes="service"))
    for capabilities, live in ((("live",), True), (("views",), False)):
        sandbox = ScriptedClone(script_says(**{"reward.txt": "1"}), capabilities=capabilities)
        assert run(sandbox, task, FrozenIds(("reward",), "reward.txt")).passed == 1
        assert sandbox.views[0].live is live


# ------------------------------------------------------------------------------------------------------------------ confirmed
def test_a_new_pass_must_be_repeated(task):
    first, second = answer(a="passed", b="passed", c="failed", d="passed"), answer(a="passed", b="failed", c="passed", d="failed")
    previous = run(ScriptedClone(answer(a="failed", b="failed", c="failed", d="passed")), task, tuple("abcd"))
    sandbox = ScriptedClone(first, second)
    report = run(sandbox, task, tuple("abcd"), confirm=True, previous=previous)
    assert report.as_bools() == {"a": True, "b": False, "c": False, "d": True}  # d is not new
    assert (report.flaky, report.outcomes["b"].status, report.seconds) == (("b",), VerifierStatus.ERROR, 0.5)
    assert [call[1]["ids"] for call in sandbox.calls] == [list("abcd")] * 2  # all: one may need what another leaves
    assert run(ScriptedClone(first, second), task, tuple("abcd"), confirm=True).flaky == ("b", "d")


def test_nothing_new_is_not_repeated(task):
    previous = run(ScriptedClone(answer(a="passed", b="passed")), task, ("a", "b"))
    sandbox = ScriptedClone(answer(a="passed", b="failed"))
    assert run(sandbox, task, ("a", "b"), confirm=True, previous=previous).passed == 1
    assert run(ScriptedClone(answer(a="passed")), task, ("a",)).passed == 1
    assert run(ScriptedClone(answer(a="failed")), task, ("a",), confirm=True).flaky == ()


def test_a_confirmation_that_the_machinery_fails_is_no_verdict(task):
    report = run(ScriptedClone(answer(a="passed"), "first", "second"), task, ("a",), confirm=True)
    assert (report.infra_error, report.total, report.seconds) == ("second", 0, 1.25)


def test_scores_are_confirmed_too(task):
    with_file(task, "tests/test.sh")
    ids = FrozenIds(("reward",), "reward.txt")
    report = run(ScriptedClone(script_says(**{"reward.txt": "1"}), script_says(**{"reward.txt": "0"})), task, ids, confirm=True)
    assert (report.passed, report.flaky) == (0, ("reward",))


# ------------------------------------------------------------------------------------------------------ the untouched environment
def answer(errors=(), **statuses):
    outcomes = {name: [status, 0.1, ""] for name, status in statuses.items()}
    return {"ids": list(statuses), "errors": list(errors), "outcomes": outcomes, "unknown": [], "runners": 1}


def test_collect_and_run_takes_one_clone_then_only_runs(task):
    sandbox = ScriptedClone(answer(a="failed", b="passed"), answer(a="passed", b="passed"))
    ids, report = collect_and_run(sandbox, task, env={"A": "image", "B": "2"}, workdir="/srv")
    assert (ids, report.as_bools(), report.source) == (("a", "b"), {"a": False, "b": True}, "runner")
    ids, report = collect_and_run(sandbox, task)
    assert (ids, report.passed) == (("a", "b"), 2)
    assert collect(sandbox, task) == ids
    (first, payload, mounts, timeout_s), (second, *_) = sandbox.calls
    assert (first, second) == ("t1_env.verifiers.worker:collect_and_run", "t1_env.verifiers.worker:run")
    assert (payload["env"], payload["workdir"], payload["test_timeout_s"]) == ({"A": "1", "B": "2"}, "/srv", 25.0)
    assert mounts == {"/tests": task.tests_dir}
    assert timeout_s > 200  # collecting and running have the task's limit each


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        (listing(), "no test found"),
        (listing("a.py::x", errors=["b.py: SyntaxError"]), "b.py: SyntaxError"),
        (listing("a.py::x", "a.py::x"), "a.py::x names more than one test"),
    ],
)
def test_collect_and_run_refuses_what_collect_refuses(task, listed, message):
    with pytest.raises(TaskError, match=message):
        collect_and_run(ScriptedClone({**listed, "outcomes": None}), task)
    with pytest.raises(VerifierError, match="second"):
        collect_and_run(ScriptedClone("first", "second"), task, retries=0)
    task.tests_dir.rmdir()
    with pytest.raises(TaskError, match="no tests directory"):
        collect_and_run(ScriptedClone(), task)


def test_what_was_only_collected_is_run_on_its_own(task):
    sandbox = ScriptedClone({**listing("a"), "outcomes": None}, answer(a="error"))
    ids, report = collect_and_run(sandbox, task)
    assert (ids, report.outcomes["a"].status) == (("a",), VerifierStatus.ERROR)
    assert [entry.partition(":")[2] for entry, *_ in sandbox.calls] == ["collect_and_run", "run"]


def test_errors_of_the_run_do_not_speak_against_the_list(task):
    ids, report = collect_and_run(ScriptedClone(answer(errors=["a.py: imports only once"], a="error")), task)
    assert (ids, report.passed) == (("a",), 0)


@pytest.fixture
def _nothing_kept(monkeypatch):
    monkeypatch.setattr(baseline_module, "_kept", {})


def with_dockerfile(task, text):
    (task.path / "environment").mkdir(exist_ok=True)
    (task.path / "environment" / "Dockerfile").write_text(text)
    return task


@pytest.mark.usefixtures("_nothing_kept")
class TestBaseline:
    def runs(self, task, *answers, backend="local", times):
        sandbox = ScriptedClone(*answers)
        got = [baseline(sandbox, task, backend=backend) for _ in range(times)]
        return len(sandbox.calls), [report.as_bools() for _, report in got]

    def test_a_copied_environment_is_judged_once_for_each_backend(self, task):
        with_dockerfile(task, "FROM x\nENV A=1\nWORKDIR /app\nCOPY files/ ./\n")
        assert self.runs(task, answer(a="passed"), times=3) == (1, [{"a": True}] * 3)
        assert self.runs(task, answer(a="failed"), backend="other", times=2) == (1, [{"a": False}] * 2)

    def test_a_command_in_the_build_needs_a_second_environment_to_agree(self, task):
        with_dockerfile(task, "FROM x\nRUN date > now\n")
        answers = [answer(a=status) for status in ("passed", "failed", "failed")]
        assert self.runs(task, *answers, times=5) == (3, [{"a": True}, *[{"a": False}] * 4])

    def test_an_image_by_its_name_needs_a_second_environment_to_agree(self, task):
        assert self.runs(task, *[answer(a="failed")] * 2, times=3) == (2, [{"a": False}] * 3)

    @pytest.mark.parametrize("status", ["error", "missing"])
    def test_a_verifier_that_did_not_decide_is_asked_again(self, task, status):
        with_dockerfile(task, "FROM x\n")
        assert self.runs(task, answer(a=status), answer(a="passed"), times=3) == (2, [{"a": False}, {"a": True}, {"a": True}])

    def test_a_sandbox_of_the_callers_own_is_always_judged(self, task):
        with_dockerfile(task, "FROM x\n")
        assert self.runs(task, *[answer(a="failed")] * 3, backend=None, times=3)[0] == 3

    def test_a_failure_of_the_machinery_is_not_kept(self, task):
        with_dockerfile(task, "FROM x\nRUN true\n")
        sandbox = ScriptedClone(answer(a="failed"), "broken", "broken", answer(a="failed"))
        reports = [baseline(sandbox, task, backend="local")[1] for _ in range(4)]
        assert [report.infra_error for report in reports] == [None, "broken", None, None]

    def test_the_oldest_goes_first(self, task, monkeypatch, tmp_path):
        monkeypatch.setattr(baseline_module, "MAX_KEPT", 2)
        with_dockerfile(task, "FROM x\n")
        tasks = [replace(task, digest=f"{tmp_path}/{index}") for index in range(3)]
        sandbox = ScriptedClone(*[answer(a="failed")] * 4)
        for index in (0, 1, 2, 2, 1, 0):
            baseline(sandbox, tasks[index], backend="local")
        assert len(sandbox.calls) == 4


def test_ids_digest_depends_on_order_and_names():
    assert ids_digest(("a", "b")) != ids_digest(("b", "a"))
    assert ids_digest(("a", "b")) == ids_digest(["a", "b"])


def test_the_package_is_light_to_import():
    code = "import sys, t1_env.verifiers; print([m for m in ('pytest', '_pytest', 'pydantic') if m in sys.modules])"
    bare = "import sys, types, pathlib; p = types.ModuleType('t1_env'); p.__path__ = [sys.argv[1]]; sys.modules['t1_env'] = p; "
    import t1_env

    out = subprocess.run([sys.executable, "-c", bare + code, next(iter(t1_env.__path__))], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
