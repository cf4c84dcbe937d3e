"""``t1-env reap`` says what it does, does what it says, and goes on where one place cannot be looked at."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from t1_env.cli import reap as command
from t1_env.cli.main import main
from t1_env.errors import SandboxUnavailable
from t1_env.sandbox import owner
from t1_env.sandbox.reaper import Finding


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that a process left whose pid is now another's."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(command, "_docker", lambda dry_run: [])
    dead = owner.file_name(owner.owner_id().rpartition(":")[0] + ":1")
    path = tmp_path / f"t1-build-{dead}-abcdefgh"
    path.mkdir()
    return path


def test_a_dry_run_removes_nothing_and_the_real_one_does(left: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reap", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert left.exists()
    assert "would be removed" in out
    assert left.name in out.replace("\n", "").replace("│", "").replace(" ", "")
    assert main(["reap"]) == 0
    out = capsys.readouterr().out
    assert not left.exists()
    assert "its owner is gone" in out
    assert main(["reap", "--dry-run"]) == 0
    assert left.name not in capsys.readouterr().out.replace("\n", "").replace("│", "").replace(" ", "")


def test_what_is_kept_is_listed_on_demand(left: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = Path(tempfile.mkdtemp(prefix=owner.directory_prefix("build")))
    main(["reap", "--dry-run"])
    assert "its owner is running" not in capsys.readouterr().out
    main(["reap", "--dry-run", "--all"])
    assert "its owner is running" in capsys.readouterr().out
    mine.rmdir()


def test_an_engine_that_does_not_answer_is_said_and_no_failure(
    left: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def silent(dry_run: bool) -> list[Finding]:
        raise SandboxUnavailable("no daemon answers at [nowhere]")

    monkeypatch.setattr(command, "_docker", silent)
    assert main(["reap"]) == 0
    assert "docker not looked at: no daemon answers at [nowhere]" in capsys.readouterr().out
    assert not left.exists()


def test_a_server_is_looked_at_only_if_asked_for_and_then_must_answer(
    left: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def silent(dry_run: bool) -> list[Finding]:
        asked.append(dry_run)
        raise SandboxUnavailable("no answer")

    monkeypatch.setattr(command, "_ssh", silent)
    assert main(["reap", "--dry-run"]) == 0
    assert asked == []
    assert main(["reap", "--dry-run", "--ssh"]) == 1
    assert asked == [True]
    assert "ssh not looked at: no answer" in capsys.readouterr().out


def test_what_could_not_be_removed_is_a_failure(left: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "_docker", lambda dry_run: [Finding("container", "abc", "failed", "the daemon refused")])
    assert main(["reap"]) == 1
    out = capsys.readouterr().out
    assert "the daemon refused" in out
    assert "1 could not be removed" in out
