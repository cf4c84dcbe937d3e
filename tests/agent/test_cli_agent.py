"""``t1-agent``: mistakes are one line and status 2, help answers without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from t1_agent.cli.main import main
from t1_env.errors import SandboxUnavailable
from t1_env.sandbox.local import LocalSandbox


def run(*arguments: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "t1_agent", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=False, **kwargs)  # type: ignore[call-overload, no-any-return]


def test_help_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\n"
        "from t1_agent.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'pyarrow', 'matplotlib', 'gymnasium.envs.mujoco'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "@quickstrat"], "did you mean"),
        (["train", "@missing.toml"], "no such file"),
        (["train", "@quickstart", "--ppo.clip_lwo", "0.1"], "ppo.clip_low"),
        (["train", "@quickstart", "--ppo.clip_low", "banana"], "ppo.clip_low"),
        (["train", "@quickstart", "--seed"], "value is missing"),
        (["train", "@quickstart", "--name", "../escape"], "name"),
        (["train"], "tasks.train is empty"),
        (["train", "@quickstart", "--tasks.train", '["families/tidy-flies?level=1"]'], "tidy-files"),
        (["train", "@quickstart", "--tasks.train", '["families/tidy-files?level=9"]'], "level"),
        (["report", "nowhere"], "not the directory of a run"),
        (["eval", "nowhere"], "not the directory of a run"),
        (["compare", "nowhere"], "not the directory of a run"),
        (["report", "."], "not the directory of a run"),
        (["frobnicate"], "invalid choice"),
        (["report", ".", "--colour", "red"], "unrecognised arguments"),
        ([], "COMMAND"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", reason="needs the agent extra: pip install 't1-terminal[agent]'")
    monkeypatch.chdir(tmp_path)
    try:
        status = main(arguments)
    except SystemExit as end:  # argparse's own way out
        status = int(end.code or 0)
    captured = capsys.readouterr()
    assert status == 2
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert captured.err.count("\n") == 1, captured.err
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_run_directory(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    done = run("train", "@quickstart", "--runs_dir", str(tmp_path / "runs"))
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)


def test_a_run_directory_that_is_a_file(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs the agent extra: pip install 't1-terminal[agent]'")
    (tmp_path / "runs").write_text("not a directory")
    done = run("train", "@quickstart", "--runs_dir", str(tmp_path / "runs"))
    assert done.returncode == 2, done.stderr
    assert "cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "runs").read_text() == "not a directory"


def test_a_machine_without_namespaces_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", reason="needs the agent extra: pip install 't1-terminal[agent]'")

    def refuse(_self: LocalSandbox) -> None:
        raise SandboxUnavailable("user namespaces are switched off: set kernel.unprivileged_userns_clone=1")

    monkeypatch.setattr(LocalSandbox, "start", refuse)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "@quickstart"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "t1-agent: user namespaces are switched off: set kernel.unprivileged_userns_clone=1\n"
    assert list(tmp_path.iterdir()) == []


def test_dry_run_prints_the_resolved_configuration(tmp_path: Path) -> None:
    done = run("train", "@quickstart", "--seed", "7", "--ppo.iterations", "2", "--dry-run", cwd=tmp_path)
    config = json.loads(done.stdout)
    assert (config["seed"], config["ppo"]["iterations"], config["name"]) == (7, 2, "quickstart")
    assert list(tmp_path.iterdir()) == []


def test_version_and_debug(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("t1-agent ")
    assert main(["--debug", "train", "@nope"]) == 2
    assert "Traceback" in capsys.readouterr().err
