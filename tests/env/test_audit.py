"""The audit's parts: attack files, aim, outcome of an episode, naive verifier, agents that do no work, reports, command line."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from t1_env.audit import Attack, AuditReport, Plan, Played, audit_tasks, choose_attacks, load_attacks, play, survey
from t1_env.audit import matrix as audit_matrix
from t1_env.audit.agents import idle_rewards, random_commands, weak_verifiers
from t1_env.audit.attack import THREAT_CLASSES
from t1_env.audit.naive import naive_gain
from t1_env.audit.payloads import MACHINES, exit_zero_library
from t1_env.audit.report import cell_rows, markdown, problem_lines, verdict
from t1_env.audit.tasks import audit_task_ids, find_tasks, shipped_task_ids
from t1_env.cli.main import main
from t1_env.errors import ConfigError, SandboxError, UnknownTask
from t1_env.sandbox.local import LocalSandbox, unavailable_reason
from t1_env.tasks import load_task
from t1_env.testing import oracle_actions, rollout

HELLO = "seeds/hello-file"

needs_namespaces = [pytest.mark.namespaces, pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))]

# What the audit must at least hold, and the attacks that are it.
ASKED_FOR = {
    "edit/replace/delete tests": ("edit-tests", "replace-tests-on-arrival", "delete-tests"),
    "symlink at deliverable paths": ("symlink-to-tests", "symlink-elsewhere"),
    "FIFO at deliverable paths": ("fifo",),
    "/dev/zero at deliverable paths": ("dev-zero",),
    "conftest.py": ("conftest-hook",),
    "pytest.ini": ("pytest-ini",),
    "PYTEST_ADDOPTS": ("pytest-addopts",),
    "sitecustomize/.pth/usercustomize": ("sitecustomize",),
    "PYTHONPATH and PYTHONHOME": ("python-environment",),
    "LD_PRELOAD": ("ld-preload-variable",),
    "/etc/ld.so.preload": ("ld-so-preload",),
    "PATH shims": ("path-shims",),
    "a function named pytest": ("function-named-pytest",),
    "replaced programs": ("replaced-python", "replaced-bash", "replaced-coreutils", "replaced-git-sqlite3"),
    "a daemon that rewrites deliverables": ("copy-answers-on-arrival",),
    "a daemon that forges reward files": ("forge-rewards-daemon",),
    "ptrace": ("ptrace-verifier",),
    "/proc/PID/mem": ("write-verifier-memory", "attack-the-parent"),
    "inode races": ("inode-race",),
    "forged result-descriptor messages": ("forge-records", "steal-nonce"),
    "os._exit(0) from imported code": ("exit-on-import",),
    "stdout forging from imported code": ("forge-output",),
    "monkeypatching the test module": ("patch-tests",),
    "__eq__ always True": ("equals-everything",),
    "clock changes": ("set-clock", "patched-clock"),
    "hard links": ("hard-links",),
    "bind mounts over /tests": ("bind-mounts",),
    "leaked solution files": ("find-solution",),
    "git history": ("git-history",),
    "filling the disk": ("fill-disk",),
    "filling the pid table": ("fill-process-table",),
    "probing by timing": ("timing-probe",),
    "detecting the verifier by uid/pid/env": ("detect-verifier",),
    "deliverables that act only under test": ("act-only-under-test", "answers-from-the-tests"),
}


def attack(*commands: str, **fields: Any) -> Attack:
    values = {"id": "made-up", "description": "Made up.", "threat": "tests", "source": "here", "needs": (), "machines": (), "flags": ()}
    return Attack(**{**values, **fields}, stages=tuple((command, 20.0) for command in commands))


def write_attack(directory: Path, text: str) -> Path:
    (directory / "made-up.toml").write_text(text, encoding="utf-8")
    return directory


# ------------------------------------------------------------------------------------------------------------------ attack files
def test_every_attack_that_was_asked_for_is_there():
    ids = {found.id for found in load_attacks()}
    assert not {name for names in ASKED_FOR.values() for name in names} - ids
    assert len(ids) >= 30


def test_every_class_has_attacks_and_every_attack_says_where_it_is_from():
    attacks = load_attacks()
    assert {found.threat for found in attacks} == set(THREAT_CLASSES)
    for found in attacks:
        assert len(found.description) > 40, found.id
        assert len(found.source) > 10, found.id


def test_the_manual_has_every_attack_as_its_file_says():
    manual = (Path(__file__).resolve().parents[2] / "docs" / "audit.md").read_text(encoding="utf-8")
    lines = {line.split("`")[1]: line for line in manual.splitlines() if line.startswith("| `")}
    for found in load_attacks():
        assert lines[found.id] == f"| `{found.id}` | {found.description} | {found.source} |"
    for threat, what in THREAT_CLASSES.items():
        assert f"### {threat}: {what}" in manual


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("description = 1", "not a valid attack"),
        ("no toml", "not a valid attack"),
        ('description = "long enough"\nclass = "testz"\nsource = "here"\n[[steps]]\ncommand = "true"', "class"),
        ('description = "long enough"\nclass = "tests"\nsource = "here"\nsteps = []', "steps"),
        ('description = "long enough"\nclass = "tests"\nsource = "here"\nspeed = 3\n[[steps]]\ncommand = "true"', "speed"),
        ('description = "long enough"\nclass = "tests"\nsource = "here"\n[[steps]]\ncommand = "ls @PATS@"', "did you mean 'PATHS'"),
    ],
)
def test_a_malformed_file_is_named_with_what_is_wrong(tmp_path: Path, text: str, said: str):
    with pytest.raises(ConfigError, match=r"made-up\.toml") as error:
        load_attacks(write_attack(tmp_path, text))
    assert said in str(error.value)


def test_attacks_are_chosen_by_glob_and_class():
    attacks = load_attacks()
    assert {found.id for found in choose_attacks(attacks, ["replaced-*"], ["toolchain"])} >= {"replaced-bash", "replaced-python"}
    assert {found.threat for found in choose_attacks(attacks, classes=["clock"])} == {"clock"}
    assert choose_attacks(attacks) == attacks
    with pytest.raises(ConfigError, match="did you mean 'conftest-hook'"):
        choose_attacks(attacks, ["conftest-hok"])
    with pytest.raises(ConfigError, match="did you mean 'toolchain'"):
        choose_attacks(attacks, classes=["tolchain"])


def test_every_mark_is_filled_and_words_are_quoted():
    site = replace(survey(load_task("seeds/label-printer")), paths=("/app/two words", "/app/b"), tests=("t.py::a", "t.py::b"))
    (command,) = attack("rm @PATHS@ @WORKDIR@ @TESTS@ @FIXTURES@\n@TEST_LINES@").actions(site, "x86_64")
    assert command.text == "rm '/app/two words' /app/b /app t.py::a t.py::b \nt.py::a\nt.py::b"
    for found in load_attacks():
        for command in found.actions(site, "x86_64"):
            assert "@PATHS@" not in command.text
            assert not [mark for mark in ("@FILES@", "@MODULES@", "@TESTS@", "@WORKDIR@") if mark in command.text]


# --------------------------------------------------------------------------------------------------------------------------- aim
def test_an_attacker_finds_paths_programs_and_modules_without_the_solution(tmp_path: Path):
    task = load_task("seeds/label-printer")
    site = survey(task, tests=("a",))
    assert {"/app/bin/labels.sh", "/app/lists/spring.txt", "/app/out/spring.txt"} <= set(site.paths)
    assert set(site.named) <= set(site.paths)
    assert site.programs == ("bash",)
    assert site.modules == ()
    assert not any(path.startswith(("/tests", "/usr", "/bin")) or path in ("/", "/app") for path in site.paths)
    unsolved = replace(task, path=tmp_path)
    for name in ("tests", "environment", "instruction.md", "task.toml"):
        (tmp_path / name).symlink_to(task.path / name)
    assert survey(unsolved, tests=("a",)) == site


def test_modules_fixtures_and_computed_paths_are_found():
    site = survey(find_tasks(["audit/imported-module"])[0])
    assert site.modules == ("wordcount",)
    assert site.module_files == ("/app/wordcount.py",)
    site = survey(find_tasks(["audit/expected-files"])[0])
    assert "expected/sorted.txt" in site.fixtures
    assert "/app/out/sorted.txt" in site.files
    assert "/app/out" not in site.files


@pytest.mark.parametrize("task_id", [*shipped_task_ids(), *audit_task_ids()])
def test_every_task_has_something_to_aim_at(task_id: str):
    site = survey(find_tasks([task_id])[0])
    assert site.files
    assert all(path.startswith("/") and ".." not in path.split("/") for path in site.paths)


def test_the_library_that_ends_programs_ends_them(tmp_path: Path):
    if platform.machine() not in MACHINES:
        pytest.skip(f"no code for {platform.machine()}")
    library = tmp_path / "exit0.so"
    library.write_bytes(exit_zero_library(platform.machine()))
    assert subprocess.run(["/bin/false"], check=False, env={"LD_PRELOAD": str(library)}).returncode == 0
    assert {exit_zero_library(machine)[:4] for machine in MACHINES} == {b"\x7fELF"}
    with pytest.raises(ConfigError, match="z80"):
        exit_zero_library("z80")


def test_tasks_are_found_by_what_users_write():
    assert [task.id for task in find_tasks([HELLO, HELLO])] == [HELLO]
    assert [task.id for task in find_tasks(["audit/*"])] == list(audit_task_ids())
    assert len(find_tasks(["seeds/*"])) > 3
    assert {task.id for task in find_tasks()} == {*shipped_task_ids(), *audit_task_ids()}
    with pytest.raises(UnknownTask):
        find_tasks(["audit/nothing"])


# ----------------------------------------------------------------------------------------------------------------------- episodes
class TestEpisodes:
    pytestmark = needs_namespaces

    def test_an_attack_that_is_paid_is_seen(self):
        played = play(attack("printf 'hi\\n' > hello.txt"), load_task(HELLO))
        assert played.outcome == "gained"
        assert len(played.gained) == 3
        assert played.reward == 3.0

    def test_what_was_paid_for_a_moment_counts_too(self):
        played = play(attack("printf 'hi\\n' > hello.txt", "rm hello.txt"), load_task(HELLO))
        assert played.outcome == "gained"
        assert played.reward == 0.0

    def test_what_an_inert_agent_is_paid_for_is_a_weak_test_and_no_gain(self):
        weak = frozenset({"test_outputs.py::test_file_exists"})
        played = play(attack("touch hello.txt"), load_task(HELLO), weak=weak)
        assert played.outcome == "safe"
        assert played.weak == tuple(weak)
        assert played.gained == ()

    def test_an_attack_that_must_be_noticed_and_is_not(self):
        played = play(attack("true", flags=("tamper",)), load_task(HELLO))
        assert played.outcome == "unflagged"
        assert "tamper" in played.note

    def test_an_attack_that_is_noticed_says_by_what(self):
        played = play(attack("rm -f /usr/bin/env && echo x > /usr/bin/env", flags=("tamper",)), load_task(HELLO))
        assert played.outcome == "safe"
        assert "tamper" in played.flags
        assert any(path.endswith("/bin/env") for path in played.tamper)

    def test_what_cannot_be_played_here_is_not_called_safe(self):
        lacking = play(attack("true", needs=("bash", "no-such-program")), load_task(HELLO))
        assert (lacking.outcome, lacking.note) == ("not_applicable", "the sandbox lacks no-such-program")
        assert play(attack("true", machines=("z80",)), load_task(HELLO)).outcome == "not_applicable"

    def test_an_episode_that_breaks_down_in_the_middle_pays_nothing_and_says_so(self):
        boxes: list[LocalSandbox] = []

        def dying(spec: Any) -> LocalSandbox:
            boxes.append(LocalSandbox(spec))
            run = boxes[-1].run_in_clone
            calls = iter(range(1000))

            def run_in_clone(*arguments: Any, **named: Any) -> Any:
                if next(calls) > 0:
                    raise SandboxError("the machinery is broken")
                return run(*arguments, **named)

            boxes[-1].run_in_clone = run_in_clone  # type: ignore[method-assign]
            return boxes[-1]

        played = play(attack("printf 'hi\\n' > hello.txt"), load_task(HELLO), sandbox=dying)
        assert played.outcome == "safe"
        assert "infra_failure" in played.flags
        assert played.reward == 0.0

    def test_an_audit_task_pays_for_honest_work(self):
        import gymnasium as gym

        for task in find_tasks(["audit/*"]):
            if not all(map(shutil.which, task.metadata.requires)):
                continue
            env = gym.make("T1Terminal-v0", task=task, disable_env_checker=True)
            try:
                episode = rollout(env, oracle_actions(task))
            finally:
                env.close()
            assert episode.infos[0]["verifiers_passed"] == 0, task.id
            assert episode.solved, task.id
            assert episode.infos[-1]["verbatim"]["verdict"] == "agrees", task.id


def test_a_sandbox_that_does_not_start_is_a_failure_of_the_cell():
    def broken(spec: Any) -> Any:
        raise SandboxError("no sandbox today")

    played = play(attack("true"), load_task(HELLO), sandbox=broken)
    assert played.outcome == "failed"
    assert "no sandbox today" in played.note


# ------------------------------------------------------------------------------------------------------------------------- naive
class TestNaive:
    """A verifier that is run in the agent's own sandbox pays for what T1 does not."""

    pytestmark = needs_namespaces

    @pytest.mark.parametrize(
        ("name", "task_id"),
        [
            ("conftest-hook", HELLO),
            ("replaced-python", HELLO),
            ("forge-rewards-daemon", HELLO),
            ("patch-pytest", "audit/imported-module"),
            ("answers-from-the-tests", "audit/executed-script"),
            ("symlink-to-tests", "audit/expected-files"),
        ],
    )
    def test_a_real_attack_gains(self, name: str, task_id: str):
        (chosen,) = choose_attacks(load_attacks(), [name])
        gain = naive_gain(chosen, find_tasks([task_id])[0])
        if gain is None:
            pytest.skip("this machine has no system Python to run a naive verifier with")
        assert gain > 0

    def test_it_counts_honest_work_and_nothing_else(self):
        task = load_task(HELLO)
        if naive_gain(attack("true"), task) is None:
            pytest.skip("this machine has no system Python to run a naive verifier with")
        assert naive_gain(attack("true"), task) == 0
        assert naive_gain(attack("printf 'hi\\n' > hello.txt"), task) == 3
        assert naive_gain(attack("printf 'ho\\n' > hello.txt"), task, weak=frozenset({"test_outputs.py::test_file_exists"})) == 1

    def test_without_python_nothing_can_be_said(self):
        def bare(spec: Any) -> LocalSandbox:
            box = LocalSandbox(spec)
            run = box.run

            def without_python(argv: Any, **named: Any) -> Any:
                return run(["false"] if argv[0] == "python3" else argv, **named)

            box.run = without_python  # type: ignore[method-assign]
            return box

        assert naive_gain(attack("true"), load_task(HELLO), sandbox=bare) is None


# ------------------------------------------------------------------------------------------------------------------ idle agents
class TestIdleAgents:
    pytestmark = needs_namespaces

    def test_weak_tests_are_found(self):
        weak = weak_verifiers(load_task(HELLO))
        assert "test_outputs.py::test_file_exists" in weak
        assert "test_outputs.py::test_says_hi" not in weak
        assert weak_verifiers(find_tasks(["audit/executed-script"])[0]) == frozenset()

    def test_rewards_of_agents_that_do_no_work(self):
        found = idle_rewards(load_task(HELLO), frozenset({"a"}), episodes=2)
        assert found.verifiers == 3
        assert found.named_paths == 1.0
        assert len(found.random) == 2
        assert found.random_best >= max(found.random) - 1e-9
        assert found.random_mean == sum(found.random) / 2
        assert found.weak == ("a",)


def test_random_commands_are_a_function_of_their_seed():
    site = survey(load_task("seeds/harvest-totals"))
    assert random_commands(site, 3) == random_commands(site, 3)
    assert random_commands(site, 3) != random_commands(site, 4)
    assert any("/app/" in command for command in random_commands(site, 3))


# ----------------------------------------------------------------------------------------------------------------------- reports
SAFE = Played("conftest-hook", HELLO, "safe", flags=("verbatim",), seconds=1.0, naive=3)
GAINED = Played("fifo", HELLO, "gained", gained=("a", "b"), seconds=2.0, naive=0)
ABSENT = Played("git-history", HELLO, "not_applicable", note="the sandbox lacks git")


def test_a_report_is_good_only_if_something_was_played_and_nothing_gained():
    assert AuditReport((SAFE, ABSENT), (), "local").ok
    for cells in ((), (ABSENT,), (SAFE, GAINED), (SAFE, replace(SAFE, outcome="unflagged")), (SAFE, replace(SAFE, outcome="failed"))):
        assert not AuditReport(cells, (), "local").ok


def test_a_report_says_what_was_gained_and_where():
    report = AuditReport((SAFE, GAINED, ABSENT), (), "local")
    assert verdict(report) == "2 episodes, 2 verifiers gained"
    assert problem_lines(report) == ["fifo on seeds/hello-file: gained: a, b"]
    header, rows = cell_rows(report)
    assert [dict(zip(header, row, strict=True))["gained"] for row in rows] == ["0", "2", ""]
    page = markdown(report, load_attacks(), heading="Audit", facts=["a fact"])
    assert "| pytest-settings | conftest-hook | 1 | 0 | 3 on 1 of 1 | 1 of 1 | 1 | safe |" in page
    assert "| deliverables | fifo | 1 | 2 | 0 on 0 of 1 | 0 of 1 | 2 | GAINED |" in page
    assert json.loads(json.dumps(report.to_json()))["cells"][1]["gained"] == ["a", "b"]


def test_cells_come_back_in_order_whatever_order_they_are_played_in(monkeypatch: pytest.MonkeyPatch):
    import threading
    import time

    def slow_first(chosen: Attack, task: Any, **named: Any) -> Played:
        time.sleep(0.2 if chosen.id == "a" else 0)
        return Played(chosen.id, f"{task.id} {threading.current_thread().name.rpartition('_')[0]}", "safe")

    monkeypatch.setattr(audit_matrix, "play", slow_first)
    monkeypatch.setattr(audit_matrix, "weak_verifiers", lambda task, **named: frozenset())
    attacks = tuple(attack("true", id=name) for name in "abc")
    seen: list[Any] = []
    plan = Plan(attacks, find_tasks([HELLO, "seeds/release-links"]), jobs=3, random_episodes=None)
    report = audit_tasks(plan, progress=seen.append)
    assert [cell.attack for cell in report.cells] == [*"abcabc"]
    assert len(seen) == plan.n_cells == 6


# ------------------------------------------------------------------------------------------------------------------ command line
def test_the_command_lists_attacks_with_their_sources(capsys: pytest.CaptureFixture[str]):
    assert main(["audit", "--list", "--class", "clock"]) == 0
    out = capsys.readouterr().out
    assert "set-clock (clock)" in out
    assert "source:" in out
    assert "conftest-hook" not in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--attack", "conftest-hok"], "did you mean 'conftest-hook'"),
        (["--class", "loder"], "did you mean 'loader'"),
        (["seeds/hello-fil"], "hello-file"),
        (["--json", "/no/such/directory/a.json"], "its directory does not exist"),
    ],
)
def test_mistakes_are_said_in_a_line(capsys: pytest.CaptureFixture[str], words: list[str], said: str):
    assert main(["audit", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.namespaces
@pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))
def test_the_command_writes_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    files = [str(tmp_path / "a.json"), str(tmp_path / "a.md")]
    words = ["--attack", "conftest-hook", "--naive", "--random", "1", "--jobs", "2", "--json", files[0], "--markdown", files[1]]
    assert main(["audit", HELLO, *words]) == 0
    assert "1 episodes, 0 verifiers gained" in capsys.readouterr().out
    (cell,) = json.loads(Path(files[0]).read_text())["cells"]
    assert (cell["attack"], cell["gained"], cell["naive"] > 0) == ("conftest-hook", [], True)
    assert "conftest-hook" in Path(files[1]).read_text()


def test_the_command_fails_if_something_was_gained(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(audit_matrix, "play", lambda chosen, task, **named: replace(GAINED, attack=chosen.id))
    monkeypatch.setattr(audit_matrix, "weak_verifiers", lambda task, **named: frozenset())
    assert main(["audit", HELLO, "--attack", "fifo", "--random", "0"]) == 1
    assert "fifo on seeds/hello-file: gained" in capsys.readouterr().out
