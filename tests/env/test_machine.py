"""What a task's Dockerfile says about variables and the working directory reaches the verifiers, the test script and the shell alike."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from t1_env.machine import Machine, sandbox_factory, sandbox_spec
from t1_env.protocol import VerifierReport
from t1_env.sandbox.base import CloneResult
from t1_env.sandbox.local import LocalSandbox, unavailable_reason
from t1_env.shell import ShellConfig
from t1_env.tasks import Task, load_task
from t1_env.timing import Stopwatch

needs_namespaces = [pytest.mark.namespaces, pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))]

DOCKERFILE = """\
FROM debian:bookworm-slim
ARG NAME=shop
ENV APP_HOME=/srv/$NAME BOTH=image
ENV PATH=$APP_HOME/bin:$PATH
WORKDIR $APP_HOME
COPY files/ ./
"""
TESTS = """\
import os, shutil
from pathlib import Path

def test_variable(): assert os.environ["APP_HOME"] == "/srv/shop"
def test_working_directory(): assert (Path.cwd(), Path("stock").read_text()) == (Path("/srv/shop"), "3\\n")
def test_path(): assert shutil.which("restock") == "/srv/shop/bin/restock" and shutil.which("ls")
def test_the_task_wins_over_the_image(): assert os.environ["BOTH"] == "task"
def test_done(): assert Path("done").exists()
"""
TEST_SH = '#!/bin/bash\n[ "$PWD" = /srv/shop ] && [ "$BOTH" = task ] && python3 -m pytest -rA "$(dirname "$0")/test_outputs.py"\n'


@pytest.fixture
def task(tmp_path: Path) -> Task:
    files = {
        "instruction.md": "Make the file done.",
        "task.toml": '[environment.env]\nBOTH = "task"\n',
        "environment/Dockerfile": DOCKERFILE,
        "environment/files/stock": "3\n",
        "environment/files/bin/restock": "#!/bin/sh\necho restocked\n",
        "tests/test_outputs.py": TESTS,
        "tests/test.sh": TEST_SH,
    }
    for name, text in files.items():
        path = tmp_path / "task" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "task/environment/files/bin/restock").chmod(0o755)
    return load_task(tmp_path / "task")


def machine_for(task: Task, shell: ShellConfig | None = None) -> Machine:
    return Machine(task, sandbox_factory("local"), shell or ShellConfig(), verify_retries=1)


@pytest.fixture
def machine(task: Task) -> Iterator[Machine]:
    made = machine_for(task)
    yield made
    made.close()


def test_no_directory_is_named_after_a_variable(task: Task) -> None:
    assert task.workdir == "/$APP_HOME"
    assert sandbox_spec(task).workdir == "/"


@pytest.mark.parametrize(
    ("settings", "network"),
    [
        ("", False),
        ('[environment]\nnetwork_mode = "public"\n', True),
        ('[agent]\nnetwork_mode = "public"\n', True),
        ('[agent]\nnetwork_mode = "no-network"\n[environment]\nnetwork_mode = "public"\n', False),
    ],
)
def test_the_network_is_off_unless_the_task_asks_for_it(task: Task, settings: str, network: bool) -> None:
    (task.path / "task.toml").write_text(settings)
    assert sandbox_spec(load_task(task.path)).network is network


class TestBuilt:
    pytestmark = needs_namespaces

    def test_the_image_reaches_verifiers_and_shell(self, machine: Machine) -> None:
        watch = Stopwatch()
        report = machine.start(watch)
        passing = ("variable", "working_directory", "path", "the_task_wins_over_the_image")
        assert report.as_bools() == {**{f"test_outputs.py::test_{name}": True for name in passing}, "test_outputs.py::test_done": False}
        assert machine.workdir == "/srv/shop"
        said = machine.session.run('pwd; echo "$APP_HOME $BOTH"; restock; ls -d /*APP* 2>/dev/null; touch done')
        assert (said.output.split(), said.cwd) == (["/srv/shop", "/srv/shop", "task", "restocked"], "/srv/shop")
        assert machine.changed(watch)
        fast = machine.verify(watch)
        assert fast.solved
        settled = machine.settle(fast, watch)
        assert (settled.agrees, settled.source, settled.report) == (True, "pytest", fast)

    def test_what_was_written_between_verifiers_and_script_is_no_disagreement(self, machine: Machine) -> None:
        untouched = machine.start(Stopwatch())
        machine.session.run("touch done")
        settled = machine.settle(untouched, Stopwatch())
        assert (settled.agrees, settled.report.solved) == (True, True)

    def test_a_script_that_disagrees_settles_on_the_lower_count(self, task: Task) -> None:
        (task.path / "tests/test.sh").write_text("echo PASSED test_outputs.py::test_variable\n")
        machine = machine_for(load_task(task.path))
        try:
            fast = machine.start(Stopwatch())
            settled = machine.settle(fast, Stopwatch())
        finally:
            machine.close()
        assert (fast.passed, settled.report.passed, settled.agrees) == (4, 1, False)
        assert len(settled.differences) == 3

    def test_the_first_start_of_a_task_takes_one_clone_the_next_none(self, task: Task) -> None:
        (task.path / "instruction.md").write_text("Another digest: nothing is known of it.")
        task = load_task(task.path)
        clones = []

        class Counting(LocalSandbox):
            def run_in_clone(self, entry: str, *args: Any, **kwargs: Any) -> CloneResult:
                clones.append(entry.partition(":")[2])
                return super().run_in_clone(entry, *args, **kwargs)

        def start(backend: str | None) -> VerifierReport:
            machine = Machine(task, Counting, ShellConfig(), verify_retries=1)
            machine._backend = backend
            try:
                report = machine.start(Stopwatch())
                assert not machine.changed(Stopwatch())
                machine.session.run("touch done")
                assert machine.changed(Stopwatch())
            finally:
                machine.close()
            return report

        reports = [start("local"), start("local"), start(None)]
        assert clones == ["collect_and_run", "run"]
        assert len({tuple(report.as_bools().items()) for report in reports}) == 1

    def test_a_working_directory_of_the_task_wins(self, task: Task) -> None:
        (task.path / "task.toml").write_text('[environment]\nworkdir = "/srv"\n')
        machine = machine_for(load_task(task.path))
        try:
            assert not machine.start(Stopwatch()).as_bools()["test_outputs.py::test_working_directory"]
            assert machine.session.run("pwd").output.strip() == "/srv"
        finally:
            machine.close()
