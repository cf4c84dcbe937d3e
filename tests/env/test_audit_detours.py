"""Links of the agent's into what only exists while verifiers run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from t1_env.sandbox import detours
from t1_env.sandbox.base import SandboxSpec
from t1_env.sandbox.local import LocalSandbox, unavailable_reason

needs_namespaces = [pytest.mark.namespaces, pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))]


def test_only_what_brings_answers_is_guarded(tmp_path: Path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "test_it.py").touch()
    (tmp_path / "test.sh").touch()
    assert not detours.brings_answers(str(tmp_path))
    (tmp_path / "sub" / "expected.txt").touch()
    assert detours.brings_answers(str(tmp_path))


def test_links_that_lead_into_a_guarded_place_are_cut_and_no_others(tmp_path: Path):
    tests, app = tmp_path / "tests", tmp_path / "app"
    (app / "below").mkdir(parents=True)
    (tests / "expected").mkdir(parents=True)
    (tests / "expected" / "answer").write_text("42")
    links = {
        "direct": tests / "expected" / "answer",
        "below/relative": "../../tests/expected/answer",
        "directory": tests / "expected",
        "whole": tests,
        "through": "directory/answer",
        "dangling-inside": tests / "none",
        "some-process": "/proc/1/root/tests/answer",
        "task": "/proc/7/task/8/cwd/tests",
        "descriptor": "/proc/self/fd/3",
        "beside": f"{tests}-of-my-own/answer",
        "elsewhere": "/etc/hostname",
        "nowhere": "none",
        "loop": "loop",
        "mounts": "/proc/self/mounts",
    }
    for name, target in links.items():
        (app / name).symlink_to(target)
    (app / "file").write_text("mine")
    found = list(detours.links_in(str(app), str(app)))
    assert sorted(found) == sorted(str(app / name) for name in links)
    kept = {"beside", "elsewhere", "nowhere", "loop", "mounts"}
    assert {Path(link).relative_to(app).as_posix() for link in detours.cut(found, [str(tests)])} == set(links) - kept
    assert {name for name in links if (app / name).is_symlink()} == kept
    assert (tests / "expected" / "answer").read_text() == "42"


@pytest.fixture
def sandbox():
    with LocalSandbox(SandboxSpec()) as box:
        yield box


def in_clone(box: LocalSandbox, script: str, mounts: dict[str, Path]) -> str:
    result = box.run_in_clone("subprocess:getoutput", script, mounts=mounts, timeout_s=60)
    assert result.error is None, result.error
    return str(result.payload)


class TestClones:
    pytestmark = needs_namespaces

    def test_an_agents_link_leads_nowhere_and_stays_where_it_is(self, sandbox: Any, tmp_path: Path):
        (tmp_path / "answer").write_text("42\n")
        made = "; ".join(
            [
                *("ln -s /tests/answer a", "ln -s /tests d", "ln -s /proc/1/root/tests/answer p", "ln -s /etc/hostname fine"),
                *("mkdir -p /usr/x", "ln -s /tests/answer /usr/x/a"),
            ]
        )
        assert sandbox.run(["sh", "-c", made]).exit_code == 0
        # Spelled so that the shell may see the tests, as a script that compares a deliverable with one of them would.
        said = in_clone(sandbox, "cd /app; cat /tests/answer; cat a d/answer p /usr/x/a; cat fine", {"/tests": tmp_path})
        lines = said.splitlines()
        assert lines[0] == "42"
        assert lines[-1] == "t1"
        assert len(lines) == 6
        assert all("No such file" in line for line in lines[1:-1])
        kept = sandbox.run(["sh", "-c", "readlink a d p /usr/x/a"]).stdout.decode().split()
        assert kept == ["/tests/answer", "/tests", "/proc/1/root/tests/answer", "/tests/answer"]

    def test_a_link_that_a_test_makes_is_the_tests_own_business(self, sandbox: Any, tmp_path: Path):
        (tmp_path / "answer").write_text("42\n")
        assert in_clone(sandbox, "cd /app; ln -s /tests/answer a; cat a /tests/answer", {"/tests": tmp_path}) == "42\n42"

    def test_without_answers_nothing_is_looked_for(self, sandbox: Any, tmp_path: Path):
        (tmp_path / "test_it.py").write_text("pass\n")
        assert sandbox.run(["sh", "-c", "ln -s /tests/test_it.py a"]).exit_code == 0
        assert in_clone(sandbox, "cat /app/a /tests/test_it.py", {"/tests": tmp_path}) == "pass\npass"
