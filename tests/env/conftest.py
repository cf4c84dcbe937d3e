"""What several tests need: stores of images and layers of their own, a user without privileges, a bench for the verifiers' worker."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import t1_env

_AS_NOBODY: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": [], "cwd": "/"}
# Without what t1_env/__init__ imports: user nobody may not be able to read where that is installed.
_STAND_IN = """\
import sys, types
package = sys.modules["t1_env"] = types.ModuleType("t1_env")
package.__path__ = [sys.argv[1] + "/t1_env"]
"""


@dataclass(frozen=True)
class Stores:
    """Directories of one test's own."""

    cache: Path
    data: Path


@pytest.fixture
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stores:
    """Empty stores of images and layers instead of the user's."""
    found = Stores(tmp_path / "stores" / "cache", tmp_path / "stores" / "data")
    monkeypatch.setenv("T1_CACHE_DIR", str(found.cache))
    monkeypatch.setenv("T1_DATA_DIR", str(found.data))
    return found


@pytest.fixture(scope="session")
def ordinary_user() -> Iterator[Callable[..., str]]:
    """Run a script as user nobody, from a copy of the package that it may read; returns what it printed.

    ``sys.argv[2:]`` of the script are the arguments after it; ``sys.argv[1]`` is a directory that it may write.
    """
    if os.getuid() != 0:
        pytest.skip("root's and an ordinary user's sandboxes are alike: the other tests run as an ordinary user already")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    with tempfile.TemporaryDirectory() as home:
        Path(home).chmod(0o777)
        shutil.copytree(Path(t1_env.__file__).parent, Path(home, "t1_env"), ignore=shutil.ignore_patterns("__pycache__", "_tasks"))
        environ = {"T1_CACHE_DIR": f"{home}/cache", "T1_DATA_DIR": f"{home}/data", "PATH": os.defpath}

        def run(script: str, *arguments: str) -> str:
            for python in (sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
                with contextlib.suppress(OSError):
                    probe = [python, "-c", "import json, tarfile, lzma"]
                    if subprocess.run(probe, check=False, capture_output=True, env={}, **_AS_NOBODY).returncode == 0:
                        break
            else:
                pytest.skip("no Python of this version that user nobody may execute: it lies in a directory closed to others")
            command = [python, "-c", _STAND_IN + script, home, *arguments]
            result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=250, env=environ, **_AS_NOBODY)
            if "SandboxUnavailable" in result.stderr:
                pytest.skip(result.stderr.splitlines()[-1])
            assert result.returncode == 0, result.stderr
            return result.stdout

        yield run


_ZYGOTE = """
import json, os, sys, types
sys.path[:] = json.loads(sys.argv[1])
package = types.ModuleType("t1_env"); package.__path__ = [sys.argv[2]]; sys.modules["t1_env"] = package
from t1_env.verifiers import worker
worker.warm()
for line in sys.stdin:
    request = json.loads(line)
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer = getattr(worker, request["function"])(request["payload"])
        except Exception as error:
            answer = {"raised": repr(error)}
        with os.fdopen(write_fd, "w") as stream:
            json.dump(answer, stream)
        os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd) as stream:
        text = stream.read()
    os.waitpid(pid, 0)
    print(text, flush=True)
"""


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, Any], Any]]:
    """Call a function of the verifiers' worker in a fork of a warm interpreter, which knows t1_env only as a stub package."""
    hostile = tmp_path_factory.mktemp("hostile")
    (hostile / "json.py").write_text("raise SystemExit('PYTHONPATH reached the worker')\n")
    hostile_env = {"PYTEST_ADDOPTS": "--no-such-option", "PYTHONPATH": str(hostile), "PYTEST_PLUGINS": "no_such_plugin", "SECRET": "1"}
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _ZYGOTE, json.dumps(sys.path), str(Path(t1_env.__file__).parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **hostile_env, "TMPDIR": str(tmp_path_factory.mktemp("tmp"))},
        cwd=hostile,
    )

    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def call(function: str, payload: Any) -> Any:
        stdin.write(json.dumps({"function": function, "payload": payload}) + "\n")
        stdin.flush()
        answer = json.loads(stdout.readline())
        assert "raised" not in answer, answer
        return answer

    yield call
    stdin.close()
    stdout.close()
    assert process.wait(10) == 0


class Bench:
    """Test files and the agent's files, to be collected and run.

    Args:
        zygote: The fixture.
        directory: To work in.
    """

    def __init__(self, zygote: Callable[[str, Any], Any], directory: Path) -> None:
        self.app, self.tests = directory / "app", directory / "tests"
        self._zygote = zygote
        self.app.mkdir()
        self.tests.mkdir()

    def test_file(self, source: str, name: str = "test_outputs.py") -> None:
        """Write a test file; it knows the agent's directory as ``APP``."""
        path = self.tests / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"APP = {str(self.app)!r}\n" + textwrap.dedent(source))

    def collect(self, timeout_s: float = 20) -> Any:
        """List the tests."""
        return self._zygote("collect", {"tests_dir": str(self.tests), "workdir": str(self.app), "timeout_s": timeout_s})

    def run(self, ids: list[str] | None = None, timeout_s: float = 20, test_timeout_s: float = 10, **more: Any) -> Any:
        """Run tests, by default all."""
        ids = self.collect()["ids"] if ids is None else ids
        payload = {"tests_dir": str(self.tests), "workdir": str(self.app), "ids": ids, "timeout_s": timeout_s}
        return self._zygote("run", {**payload, "test_timeout_s": test_timeout_s, **more})

    def collect_and_run(self, timeout_s: float = 20, test_timeout_s: float = 10) -> Any:
        """Both in one go."""
        payload = {"tests_dir": str(self.tests), "workdir": str(self.app), "timeout_s": timeout_s, "test_timeout_s": test_timeout_s}
        return self._zygote("collect_and_run", payload)

    def statuses(self, **kwargs: Any) -> dict[str, str]:
        """Name of each test -> its status."""
        report = self.run(**kwargs)
        return {name.partition("::")[2]: status for name, (status, _, _) in report["outcomes"].items()}


@pytest.fixture
def bench(zygote: Callable[[str, Any], Any], tmp_path: Path) -> Bench:
    """A place to write tests and run them in."""
    return Bench(zygote, tmp_path)
