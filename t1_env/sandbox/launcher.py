"""The host process's side of the zygote: starts it, restarts it when it died, one per process."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.metadata
import json
import os
import select
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from t1_env.errors import SandboxError, SandboxUnavailable
from t1_env.sandbox import owner, reaper, wire

START_TIMEOUT_S: Final = 30.0
_PACKAGE: Final = Path(__file__).resolve().parents[1]
_DISTRIBUTION: Final = "t1_terminal"
# A stand-in for the t1_env package: its submodules import as usual, but t1_env/__init__ (gymnasium, numpy) never runs in the zygote.
_BOOTSTRAP: Final = """\
import importlib.machinery, json, sys, types
config = json.loads(sys.argv[1])
sys.path[:] = config["path"]
package = types.ModuleType("t1_env")
package.__path__ = [config["package"]]
package.__spec__ = importlib.machinery.ModuleSpec("t1_env", None, is_package=True)
package.__spec__.submodule_search_locations = package.__path__
sys.modules["t1_env"] = package
from t1_env.sandbox.zygote import main
main(config["fd"], config)
"""


@dataclass(slots=True)
class Program:
    """How this very interpreter is started again; an outpost that brought its own sets it before the first sandbox starts.

    Args:
        command: Start of a command line: the interpreter, perhaps with its loader before it. Empty for ``sys.executable``.
        executable: One file that is the interpreter, for programs that want ``sys.executable``. Empty for the real ``sys.executable``.
    """

    command: tuple[str, ...] = ()
    executable: str = ""


PROGRAM: Final = Program()
"""The one of this process."""


@dataclass(slots=True)
class _Zygote:
    process: subprocess.Popen[bytes]
    sock: socket.socket
    preloaded: set[str]


class Launcher:
    """Hands requests to this process's zygote. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._zygote: _Zygote | None = None

    def request(self, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        """Ask the zygote for a keeper that talks on the first of ``fds`` and is handed the rest.

        Starts the zygote if there is none or it died.

        Raises:
            SandboxUnavailable: The zygote cannot set itself up on this machine.
        """
        with self._lock:
            for attempt in (1, 2):
                zygote = self._zygote or self._start()
                self._zygote = zygote
                try:
                    wire.send(zygote.sock, message, fds)
                except wire.Disconnected as error:
                    self._discard(zygote)
                    if attempt == 2:
                        raise SandboxError("the sandbox launcher died twice in a row; is the machine out of memory?") from error
                else:
                    return

    @property
    def died(self) -> bool:
        """Whether the zygote that took the last request is gone."""
        with self._lock:
            return self._zygote is None or bool(select.select([self._zygote.sock], [], [], 0)[0])  # it never speaks once it is ready

    def preload(self, module: str) -> None:
        """Have later keepers start with ``module`` imported."""
        with self._lock:
            zygote = self._zygote
            if zygote is not None and module not in zygote.preloaded:
                zygote.preloaded.add(module)
                with contextlib.suppress(wire.Disconnected):  # the next request starts a new one
                    wire.send(zygote.sock, {"op": "preload", "module": module})

    def stop(self) -> None:
        """End the zygote; sandboxes that are running stay."""
        with self._lock:
            if self._zygote is not None:
                self._discard(self._zygote)

    def forget(self) -> None:
        """In a forked child: let go of the parent's zygote without disturbing it."""
        zygote, self._zygote = self._zygote, None
        self._lock = threading.Lock()
        if zygote is not None:
            zygote.sock.close()
            zygote.process.returncode = 0  # not ours to wait for

    def _discard(self, zygote: _Zygote) -> None:
        self._zygote = None
        zygote.sock.close()
        try:
            zygote.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            zygote.process.kill()
            zygote.process.wait()

    def _start(self) -> _Zygote:
        reaper.reap_local(everywhere=False)
        ours, theirs = socket.socketpair()
        config = {**zygote_config(), "fd": theirs.fileno(), "owner": owner.owner_id()}
        try:
            process = subprocess.Popen(
                [*config["python"], "-I", "-S", "-c", _BOOTSTRAP, json.dumps(config)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                cwd="/",
                env={"LANG": "C.UTF-8", "TZ": "UTC", "PATH": os.defpath},
                start_new_session=True,  # ^C on the terminal is for the host process
            )
        except OSError as error:
            ours.close()
            raise SandboxUnavailable(f"the local sandbox cannot start its launcher ({config['python'][0]}): {error.strerror}") from error
        finally:
            theirs.close()
        try:
            message = _first_message(ours)
        except (wire.Disconnected, TimeoutError) as error:
            ours.close()
            process.kill()
            assert process.stderr is not None
            with process.stderr:
                tail = process.stderr.read().decode("utf-8", "replace").strip().splitlines()[-1:]
            process.wait()
            raise SandboxError(f"the local sandbox's launcher ended while starting: {' '.join(tail) or 'no message'}") from error
        assert process.stderr is not None
        process.stderr.close()
        if "error" in message:
            ours.close()
            process.wait()
            raise SandboxUnavailable(explain_refusal(message["error"], message.get("errno")))
        return _Zygote(process, ours, set())


LAUNCHER: Final = Launcher()
"""The one launcher of this process."""


def zygote_config() -> dict[str, Any]:
    """What the zygote needs to know about this interpreter: where to import from, and what a clone must mount to go on importing."""
    path = [str(Path(entry).resolve()) for entry in sys.path if entry and Path(entry).exists()]
    base = str(Path(sys.base_prefix).resolve())
    wanted = [base, *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))]
    wanted += [entry for entry in path if Path(entry).name in ("site-packages", "dist-packages")]
    wanted.append(str(_PACKAGE))
    roots: list[str] = []
    for candidate in sorted({str(Path(entry).resolve()) for entry in wanted}, key=len):
        if Path(candidate).is_dir() and not any(candidate == root or candidate.startswith(f"{root}/") for root in roots):
            roots.append(candidate)
    # The standard library and site-packages first: a module of the caller's must not stand in for one of those in the zygote.
    path.sort(key=lambda entry: not any(entry == root or entry.startswith(f"{root}/") for root in roots))
    return {
        "path": path,
        "package": str(_PACKAGE),
        "python": PROGRAM.command or (sys.executable or getattr(sys, "_base_executable", ""),),
        "roots": roots,
        "hidden": [str(tasks)] if (tasks := _PACKAGE / "_tasks").is_dir() else [],
        "executable": PROGRAM.executable or str(Path(sys.executable).resolve()),
    }


@functools.cache
def installation_paths() -> tuple[Path, ...]:
    """T1's own files on this machine: never visible in a sandbox, wherever they lie."""
    parent = _PACKAGE.parent
    paths = [_PACKAGE, parent / "t1_agent", *parent.glob(f"{_DISTRIBUTION}-*.dist-info")]
    if (parent / "tasks").is_dir() and (parent / "pyproject.toml").is_file():
        paths.append(parent / "tasks")  # a source checkout
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        located = importlib.metadata.distribution(_DISTRIBUTION).locate_file("")
        paths += Path(str(located)).glob(f"{_DISTRIBUTION}-*.dist-info")
    return tuple(dict.fromkeys(path for path in paths if path.exists()))


def explain_refusal(what: str, code: int | None) -> str:
    """A message that says what the kernel refused and what to enable."""
    hints = []
    if _setting("kernel/unprivileged_userns_clone") == "0":
        hints.append("run `sysctl -w kernel.unprivileged_userns_clone=1` as root")
    if _setting("kernel/apparmor_restrict_unprivileged_userns") == "1" and os.geteuid() != 0:
        hints.append("run `sysctl -w kernel.apparmor_restrict_unprivileged_userns=0` as root")
    if _setting("user/max_user_namespaces") == "0":
        hints.append("run `sysctl -w user.max_user_namespaces=10000` as root")
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        hints.append(
            "in a container, start it with `--security-opt seccomp=unconfined --security-opt systempaths=unconfined "
            "--security-opt apparmor=unconfined` (or `--privileged`)"
        )
    if not hints:
        hints.append("it needs Linux 5.12 or later with user namespaces, overlayfs and tmpfs; run as root where users may not make them")
    reason = f"{what} (errno {code})" if code else what
    return f"the local sandbox needs Linux namespaces, and the kernel refused: {reason}. To enable them: {'; or '.join(hints)}."


def _setting(name: str) -> str | None:
    try:
        return Path("/proc/sys", name).read_text(encoding="ascii").strip()
    except OSError:
        return None


def _first_message(sock: socket.socket) -> wire.Message:
    if not select.select([sock], [], [], START_TIMEOUT_S)[0]:
        raise TimeoutError
    return wire.receive(sock)[0]


def _after_fork_in_child() -> None:
    LAUNCHER.forget()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(LAUNCHER.stop)
