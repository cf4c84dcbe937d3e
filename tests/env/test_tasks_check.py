"""Lints, and ``check_task`` through the environment."""

import shutil
from pathlib import Path

import pytest

from t1_env.tasks import load_task
from t1_env.tasks.check import check_task, lint_task
from t1_env.tasks.corpus import corpus_root


@pytest.fixture
def own_task(tmp_path) -> Path:
    return Path(shutil.copytree(corpus_root() / "seeds" / "hello-file", tmp_path / "hello-file"))


def test_the_smallest_task_has_no_lint():
    assert lint_task(load_task("seeds/hello-file")) == ()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tests/test_outputs.py", "def test_x(:\n", "line 1: invalid syntax"),
        ("tests/test_outputs.py", "import numpy.linalg\n", "imports 'numpy.linalg'"),
        ("tests/test_outputs.py", "from requests import get\n", "imports 'requests'"),
        ("tests/test_outputs.py", "def test_x():\n    assert True\n", "test_x does not say which requirement"),
        ("tests/test_outputs.py", '"""CANARY GUID 123"""\n', "holds a canary"),
        ("instruction.md", "Do.\n# canary\n", "holds a canary"),
        ("solution/solve.sh", "#!/bin/bash\n", "no steps"),
        ("solution/solve.sh", "# step: a\n", "holds no command"),
        ("solution/slips.json", "[1]", "slip 0"),
        ("environment/Dockerfile", "RUN true\n", "no FROM line"),
        ("task.toml", "[task]\nname = 't1/other'\n", "task.name ends in 'other', but the directory is 'hello-file'"),
        ("task.toml", "", "no [task] name"),
    ],
)
def test_lints(own_task, name, content, said):
    (own_task / name).write_text(content)
    assert any(said in problem for problem in lint_task(load_task(own_task)))


@pytest.mark.parametrize("name", ["tests/test.sh", "solution/solve.sh"])
def test_missing_scripts(own_task, name):
    (own_task / name).unlink()
    assert f"{name} is missing" in lint_task(load_task(own_task))


@pytest.fixture
def _sandbox():
    from t1_env.sandbox.local import unavailable_reason

    if reason := unavailable_reason():
        pytest.skip(reason)


@pytest.mark.namespaces
@pytest.mark.usefixtures("_sandbox")
class TestPlayed:
    def test_a_sound_task(self):
        found = check_task(load_task("seeds/hello-file"), slips=True)
        assert found.problems == ()
        assert found.sound
        assert (found.n_verifiers, found.n_steps, found.n_slips, found.requires) == (3, 1, 3, ("bash",))

    @pytest.mark.parametrize(
        ("name", "content", "said"),
        [
            ("solution/solve.sh", "# step: wrong\necho ho > hello.txt\n", "the oracle fails test_outputs.py::test_says_hi"),
            ("environment/Dockerfile", "FROM x\nWORKDIR /app\nRUN echo hi > hello.txt\n", "doing nothing passes"),
            (
                "solution/slips.json",
                '[{"step": 0, "command": "echo hi > /app/hello.txt", "kind": "none"}]',
                "'none' at step 0 costs no verifier",
            ),
            ("tests/test_outputs.py", "def test_a():\n    'x'\n    assert open('/app/hello.txt')\n", "1 verifiers; expected 3 to 10"),
            ("environment/Dockerfile", "FROM x\nWORKDIR /app\nRUN exit 3\n", "RUN"),
            ("tests/test.sh", "mkdir -p /logs/verifier; echo 0 >/logs/verifier/reward.txt\n", "the oracle: test.sh disagrees"),
            ("tests/test.sh", "mkdir -p /logs/verifier; echo 1 >/logs/verifier/reward.txt\n", "doing nothing: test.sh disagrees"),
            ("tests/test.sh", "true\n", "the oracle: test.sh gives no verdict: test.sh left no result"),
        ],
    )
    def test_an_unsound_task(self, own_task, name, content, said):
        (own_task / name).write_text(content)
        found = check_task(load_task(own_task), slips=True)
        assert not found.sound
        assert said in " | ".join(found.problems)
