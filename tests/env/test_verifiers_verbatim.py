"""The task's own test.sh: run word for word, read from whatever it leaves, settled against the fast runner."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import MappingProxyType

import pytest

import t1_env
from t1_env.errors import SandboxDied
from t1_env.protocol import VerifierOutcome, VerifierReport, VerifierStatus
from t1_env.sandbox.base import CloneResult
from t1_env.tasks.schema import T1Metadata, TaskConfig
from t1_env.tasks.task import Task
from t1_env.verifiers import FrozenIds
from t1_env.verifiers.verbatim import VerbatimResult, parse_results, run_verbatim, settle

IDS = ("test_outputs.py::test_a", "test_outputs.py::TestB::test_b[x y]", "test_outputs.py::test_c")
P, F, M, E = VerifierStatus.PASSED, VerifierStatus.FAILED, VerifierStatus.MISSING, VerifierStatus.ERROR


def statuses(report):
    return [outcome.status for outcome in report.outcomes.values()]


def report(*passed, source="runner", ids=IDS):
    return VerifierReport(
        outcomes=MappingProxyType({name: VerifierOutcome(P if ok else F) for name, ok in zip(ids, passed, strict=True)}), source=source
    )


# ------------------------------------------------------------------------------------------------------------------------- parsing
CTRF = json.dumps({"results": {"tests": [{"name": IDS[0], "status": "passed"}, {"name": f"tests/{IDS[1]}", "status": "skipped"}]}})
JUNIT = """<testsuites><testsuite><testcase classname="tests.test_outputs" name="test_a"/>
<testcase classname="tests.test_outputs.TestB" name="test_b[x y]"><failure/></testcase>
<testcase classname="tests.test_outputs" name="test_c"><skipped/></testcase></testsuite></testsuites>"""
LINES = f"""
PASSED ../tests/{IDS[0]}
XPASS ../tests/{IDS[1]}
SKIPPED [1] test_outputs.py:3: no
FAILED ../tests/{IDS[2]} - assert 0
ERROR ../tests/other.py::test_z - x
PASSED in a sentence
"""


@pytest.mark.parametrize(
    ("files", "output", "source", "expected"),
    [
        ({"ctrf.json": CTRF, "reward.txt": "1"}, LINES, "ctrf", [P, F, M]),
        ({"junit.xml": JUNIT}, LINES, "junit", [P, F, F]),
        ({"reward.txt": "1"}, LINES, "pytest", [P, F, F]),
        ({"reward.json": '{"speed": 1.0, "size": 0.5}', "reward.txt": "1"}, "", "reward.json", [P, F]),
        ({"reward.txt": "1\n"}, "no tests named", "reward.txt", [P]),
        ({"reward.txt": "0"}, "", "reward.txt", [F]),
        ({"reward.json": '{"speed": NaN}', "reward.txt": "1"}, "", "reward.txt", [P]),
        ({"reward.json": '{"speed": "1"}', "reward.txt": "0"}, "", "reward.txt", [F]),
        ({"ctrf.json": "{broken", "junit.xml": "<testcase", "reward.json": "[]", "reward.txt": "1"}, "", "reward.txt", [P]),
    ],
)
def test_the_best_source_is_read(files, output, source, expected):
    parsed = parse_results(files, output, IDS)
    assert (parsed.source, statuses(parsed)) == (source, expected)


def test_nothing_readable_is_no_verdict():
    assert parse_results({"reward.txt": "excellent"}, "hello", IDS) is None
    assert parse_results({"reward.txt": "inf", "reward.json": '{"speed": Infinity}'}, "hello", IDS) is None
    assert parse_results({}, "", IDS) is None


@pytest.mark.parametrize(
    ("files", "output", "source", "expected"),
    [
        ({"ctrf.json": CTRF}, "", "ctrf", {IDS[0]: P, f"tests/{IDS[1]}": F}),
        ({}, f"PASSED {IDS[0]}\nPASSED {IDS[0]}\nFAILED {IDS[2]}\n", "pytest", {IDS[0]: E, IDS[2]: F}),
        ({"reward.json": '{"speed": 1.0, "size": 0.5}'}, "", "reward.json", {"speed": P, "size": F}),
        ({"reward.txt": "0.5"}, "", "reward.txt", {"reward": F}),
    ],
)
def test_without_a_list_whatever_is_reported_is_the_list(files, output, source, expected):
    parsed = parse_results(files, output, None)
    assert (parsed.source, {name: outcome.status for name, outcome in parsed.outcomes.items()}) == (source, expected)


def test_scores_are_brought_onto_the_frozen_keys():
    ids = FrozenIds(("speed", "size"), "reward.json")
    parsed = parse_results({"reward.json": '{"speed": 1, "style": 1}'}, "", ids)
    assert ({name: outcome.status for name, outcome in parsed.outcomes.items()}, parsed.unknown) == ({"speed": P, "size": M}, ("style",))
    assert statuses(parse_results({"reward.txt": "1"}, "", ids)) == [M, M]


def test_an_id_reported_twice_does_not_pass_and_strangers_are_flagged():
    parsed = parse_results({}, f"PASSED {IDS[0]}\nPASSED {IDS[0]}\nPASSED x.py::y\n", IDS)
    assert statuses(parsed) == [E, M, M]
    assert parsed.unknown == ("x.py::y",)


def test_entities_in_junit_are_not_expanded():
    assert parse_results({"junit.xml": "<!DOCTYPE a [<!ENTITY b 'c'>]>" + JUNIT}, "", IDS) is None


# ------------------------------------------------------------------------------------------------------------------------- settling
def test_agreement_pays_the_runner():
    fast = report(1, 0, 1)
    settled = settle(fast, VerbatimResult(report(1, 0, 1, source="ctrf")))
    assert settled.report is fast
    assert settled.agrees
    assert settled.differences == ()


@pytest.mark.parametrize(("fast", "other"), [((1, 1, 1), (1, 0, 1)), ((1, 0, 0), (1, 0, 1)), ((1, 0, 0), (0, 1, 0))])
def test_disagreement_is_named_and_the_lower_count_is_paid(fast, other):
    settled = settle(report(*fast), VerbatimResult(report(*other, source="ctrf")))
    assert settled.agrees is False
    assert len(settled.differences) == sum(a != b for a, b in zip(fast, other, strict=True))
    assert settled.report.passed == min(sum(fast), sum(other))


@pytest.mark.parametrize(
    ("fast", "reward", "agrees", "paid"),
    [((1, 1, 1), 1, True, 3), ((1, 1, 0), 0, True, 2), ((1, 1, 1), 0, False, 0), ((1, 1, 0), 1, False, 2)],
)
def test_a_lone_number_speaks_about_everything_at_once(fast, reward, agrees, paid):
    settled = settle(report(*fast), VerbatimResult(report(reward, source="reward.txt", ids=("reward",))))
    assert (settled.agrees, settled.report.passed) == (agrees, paid)


def test_the_settlement_in_a_word():
    fast, other = report(1, 1, 0), report(1, 0, 0, source="ctrf")
    said = [settle(fast, opinion) for opinion in (VerbatimResult(other), VerbatimResult(fast), VerbatimResult(None, "no bash"))]
    assert [settled.verdict for settled in said] == ["disagrees", "agrees", "no_verdict"]
    assert [settled.source for settled in said] == ["ctrf", "runner", ""]
    assert settle(fast, VerbatimResult(None, "clone failed", failed=True)).verdict == "infra_failure"
    assert settle(VerifierReport(infra_error="gone"), VerbatimResult(other)).verdict == "infra_failure"


def test_without_a_second_opinion_the_runner_stands():
    fast = report(1, 1, 1)
    settled = settle(fast, VerbatimResult(None, problem="no bash"))
    assert (settled.report, settled.agrees, settled.note) == (fast, None, "no bash")
    broken = VerifierReport(infra_error="gone")
    assert settle(broken, VerbatimResult(report(1, 1, 1))).report is broken


# ------------------------------------------------------------------------------------------------------------------- running test.sh
WORKER = """
import json, sys, types
sys.path[:] = json.loads(sys.argv[1])
package = types.ModuleType("t1_env"); package.__path__ = [sys.argv[2]]; sys.modules["t1_env"] = package
from t1_env.verifiers import worker, verbatim_worker
worker.warm()
answer = verbatim_worker.run_script(json.loads(sys.argv[3]))
sys.__stdout__.write(json.dumps(answer))
"""


class LocalClone:
    """Runs the worker in a fresh process instead of a clone; paths stay the host's."""

    capabilities = frozenset({"clone"})

    def __init__(self, task, tmp_path):
        self.task, self.logs = task, tmp_path / "logs"

    def run_in_clone(self, entry, payload, *, mounts=None, timeout_s=60.0):
        assert entry == "t1_env.verifiers.verbatim_worker:run_script"
        script = next((os.fspath(source) for target, source in (mounts or {}).items() if target == payload["script"]), None)
        inside = payload["script"].replace("/tests", os.fspath(self.task.tests_dir), 1)
        payload = {**payload, "tests_dir": os.fspath(self.task.tests_dir), "logs_dir": os.fspath(self.logs), "script": script or inside}
        argv = [sys.executable, "-I", "-S", "-c", WORKER, json.dumps(sys.path), str(Path(t1_env.__file__).parent), json.dumps(payload)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)
        return CloneResult(None, 0.1, done.stderr) if done.returncode else CloneResult(json.loads(done.stdout), 0.1)


@pytest.fixture
def case(tmp_path):
    tests, app = tmp_path / "tests", tmp_path / "app"
    tests.mkdir()
    app.mkdir()
    (tests / "test_outputs.py").write_text(
        f"def test_a(): pass\nclass TestB:\n    def test_b(self): assert open({str(app / 'out')!r}).read() == 'x'\n"
    )
    config = TaskConfig.model_validate({"verifier": {"timeout_sec": 30.0}})
    task = Task("x", tmp_path, "do", config, T1Metadata(), digest="d", workdir=os.fspath(app))
    sandbox = LocalClone(task, tmp_path)
    ids = ("test_outputs.py::test_a", "test_outputs.py::TestB::test_b")

    def run(script, **kwargs):
        text = textwrap.dedent(script).replace("/logs/verifier", os.fspath(sandbox.logs)).replace("/tests", os.fspath(tests))
        (tests / "test.sh").write_text(f"#!/bin/bash\n{text}")
        return run_verbatim(sandbox, task, ids, **kwargs)

    run.app, run.logs, run.task, run.sandbox, run.ids = app, sandbox.logs, task, sandbox, ids
    return run


OURS = """
    mkdir -p /logs/verifier
    if ! python3 -c 'import pytest' 2>/dev/null; then
      echo MUST-NOT-INSTALL; exit 3
    fi
    if python3 -m pytest -p no:cacheprovider -rA "$(dirname "$0")/test_outputs.py"; then
      echo 1 > /logs/verifier/reward.txt
    else
      echo 0 > /logs/verifier/reward.txt
    fi
"""


def test_our_own_script(case):
    result = case(OURS)
    assert result.problem is None, result
    assert (result.report.source, statuses(result.report)) == ("pytest", [P, F])
    (case.app / "out").write_text("x")
    assert statuses(case(OURS).report) == [P, P]


def test_the_usual_uvx_script(case):
    result = case("""
        apt-get update && apt-get install -y curl
        curl -LsSf https://astral.sh/uv/0.9.5/install.sh | sh
        uvx -p 3.13 -w pytest==8.4.1 -w pytest-json-ctrf==0.3.5 pytest --ctrf /logs/verifier/ctrf.json /tests/test_outputs.py -rA
        if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
    """)
    assert result.problem is None, result
    assert (result.report.source, statuses(result.report)) == ("ctrf", [P, F])
    assert (case.logs / "reward.txt").read_text() == "0\n"


def test_junit_and_plain_pytest(case):
    result = case("pytest --junitxml=/logs/verifier/junit.xml --rootdir=/tests /tests/test_outputs.py >/dev/null")
    assert (result.report.source, statuses(result.report)) == ("junit", [P, F])
    assert result.exit_code == 1


def test_python_in_its_other_forms(case):
    result = case("""
        echo 'import sys; print("script", sys.argv[1:], __name__)' > s.py
        python3 s.py a b
        python3 -X utf8 -c 'import sys; print("dash-c", sys.argv)' y
        echo 'print("stdin")' | python3 -
        X=1 python3 -c 'import os; print("env", os.environ["X"], os.getcwd())'
        python3 -m json.tool --compact <<< '{"a":  1}'
        python3 -c 'raise SystemExit(7)'; echo "code $?"
        python3 -c 'raise ValueError("boom")'; echo "code $?"
        python3 -c 'import os; os.kill(os.getpid(), 9)'; echo "code $?"
        mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt
    """)
    for text in (
        "script ['a', 'b'] __main__",
        "dash-c ['-c', 'y']",
        "stdin",
        f"env 1 {case.app}",
        '{"a":1}',
        "code 7",
        "code 1",
        "code 137",
    ):
        assert text in result.output
    assert "ValueError: boom" in result.output
    assert result.report.source == "reward.txt"


def test_results_left_by_the_agent_are_not_results(case):
    case.logs.mkdir()
    (case.logs / "reward.txt").write_text("1")
    (case.logs / "ctrf.json").write_text(CTRF)
    result = case("echo nothing")
    assert result.report is None
    assert "no result" in result.problem


def test_a_result_file_that_is_not_a_regular_file_is_not_read(case):
    result = case("mkdir -p /logs/verifier; ln -s /etc/passwd /logs/verifier/reward.txt; mkfifo /logs/verifier/ctrf.json")
    assert result.report is None


def test_a_script_that_hangs_has_no_verdict(case):
    result = case("mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; python3 -c 'import time; time.sleep(60)'", timeout_s=1.0)
    assert result.report is None
    assert "did not end" in result.problem


@pytest.mark.parametrize("place", ["tests", "."])
def test_the_script_of_terminal_bench_1(case, place):
    script = case.task.path / place / "run-tests.sh"
    script.write_text(
        "#!/bin/bash\napt-get install -y curl\ncurl -LsSf https://astral.sh/uv/0.7.13/install.sh | sh\nsource $HOME/.local/bin/env\n"
        'uv init\nuv add pytest==8.4.1\nuv pip install pytest\necho "$TEST_DIR"\n'
        f"cd {case.task.tests_dir} && uv run pytest test_outputs.py -rA\n"
    )
    case.app.joinpath("home").mkdir()
    result = run_verbatim(case.sandbox, case.task, case.ids, env={"HOME": os.fspath(case.app / "home")})
    assert result.problem is None, result
    assert (result.report.source, statuses(result.report)) == ("pytest", [P, F])
    assert "/tests" in result.output.splitlines()


def test_a_task_without_a_script(case):
    result = run_verbatim(case.sandbox, case.task, ("a",))
    assert "no tests/test.sh" in result.problem


def test_a_failure_of_the_machinery_is_tried_again_and_told_apart(case):
    class Breaks:
        capabilities = frozenset({"clone"})

        def __init__(self, *answers):
            self.answers = list(answers)

        def run_in_clone(self, entry, payload, *, mounts=None, timeout_s=60.0):
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return CloneResult(None, 0.1, answer) if isinstance(answer, str) else CloneResult(answer, 0.1)

    case("true")  # writes a test.sh
    good = {"problem": None, "files": {"reward.txt": "1"}, "output": "", "exit_code": 0}
    assert run_verbatim(Breaks("first", good), case.task, ("a",)).report.solved
    for answers in (("first", "second"), (SandboxDied("second"),)):
        result = run_verbatim(Breaks(*answers), case.task, ("a",))
        assert (result.report, result.failed) == (None, True)
        assert "second" in result.problem
    assert not case("exit 0").failed
