"""What several tests of sandboxes need: stores of images and layers of their own, and a user without privileges."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
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
