"""Runs a task's own test script inside a clone, word for word, with the trusted interpreter standing in for Python and pytest.

A bare sandbox has no pytest, often no Python, and no network to install them from. So a directory of small bash scripts comes first in
``PATH``: each announces its process id and waits, and the supervisor forks the warm interpreter, reads arguments, environment, working
directory and descriptors of the waiting process from ``/proc``, and does in its place what was asked (``pytest ...``, ``python3 -m ...``,
``python3 -c ...``, a script, ``uvx ... pytest ...``). Installers answer success without doing anything.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NoReturn

import pytest

from t1_env.verifiers import worker
from t1_env.verifiers.runner_process import test_environment

LOGS_DIR: Final = "/logs/verifier"
"""Where Harbor's test scripts leave their results."""
RESULT_FILES: Final = ("ctrf.json", "junit.xml", "results.xml", "reward.json", "reward.txt")
FILE_LIMIT_BYTES: Final = 1 << 22
OUTPUT_LIMIT_BYTES: Final = 1 << 20

_INTERPRETERS: Final = ("python", "python3", "pytest", "py.test", "uvx", "uv")
_INSTALLERS: Final = ("apt", "apt-get", "pip", "pip3")
_UV_SETUP: Final = ("add", "init", "lock", "pip", "python", "sync", "venv")
_FLAGS_WITH_VALUE: Final = ("-X", "-W")
# Descriptors are copied first: while bash runs "echo >file", its own descriptor 1 is that file.
_SHIM: Final = """#!/bin/bash
exec 7<&0 8>&1 9>&2
mkfifo "{root}/$$" && echo "$$" >"{root}/requests" && read -r code <"{root}/$$"
exit "${{code:-127}}"
"""
_CURL_SHIM: Final = """#!/bin/bash
case "$*" in *astral.sh/uv*) mkdir -p "$HOME/.local/bin" && touch "$HOME/.local/bin/env"; exit 0 ;; esac
PATH="${{PATH#{root}/bin:}}" exec curl "$@"
"""


def warm() -> None:
    """Prepare the interpreter that is to be forked; see `worker.warm`."""
    worker.warm()


def run_script(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Run the script and bring back what it left.

    Args:
        payload: ``tests_dir``, ``workdir``, ``timeout_s``, optionally ``env``, ``script`` (default ``test.sh`` of the tests) and
            ``logs_dir`` (default `LOGS_DIR`).

    Returns:
        ``{"exit_code": int | None, "output": tail of its output, "files": {name: text}, "problem": str | None}``. ``problem`` says why
        there can be no verdict (no bash, ran out of time).
    """
    logs = Path(payload.get("logs_dir", LOGS_DIR))
    for path in (logs.parent, logs):
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            path.unlink()
    shutil.rmtree(logs, ignore_errors=True)  # what the agent put there is not a result
    logs.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="t1-") as directory:
        return _Script(payload, Path(directory), logs).run()


class _Script:
    """One run of a ``test.sh`` and the requests it makes of the trusted interpreter."""

    def __init__(self, payload: Mapping[str, Any], root: Path, logs: Path) -> None:
        self.payload = payload
        self.root = root
        self.logs = logs
        self.deadline = time.monotonic() + float(payload["timeout_s"])
        self.script = str(payload.get("script") or f"{payload['tests_dir']}/test.sh")
        self.children: dict[int, int] = {}  # pid of an interpreter -> pid of the process that waits for it
        self.replies: dict[int, int] = {}  # pid of a waiting process -> exit status it has not read yet

    def run(self) -> dict[str, Any]:
        self._write_shims()
        requests = os.open(self.root / "requests", os.O_RDWR | os.O_NONBLOCK)  # read-write: never sees end of file
        output = self.root / "output"
        try:
            with output.open("ab") as stream:
                bash = self._start(stream.fileno())
                problem = self._serve(bash, requests)
            return {"exit_code": bash.returncode, "output": _tail(output), "files": self._files(), "problem": problem}
        except FileNotFoundError as error:
            return {"exit_code": None, "output": "", "files": {}, "problem": f"the sandbox cannot run {Path(self.script).name}: {error}"}
        finally:
            os.close(requests)
            for child in self.children:
                _kill_session(child)

    def _write_shims(self) -> None:
        directory = self.root / "bin"
        directory.mkdir()
        os.mkfifo(self.root / "requests")
        scripts = dict.fromkeys(_INTERPRETERS, _SHIM) | dict.fromkeys(_INSTALLERS, "#!/bin/bash\nexit 0\n") | {"curl": _CURL_SHIM}
        for name, text in scripts.items():
            path = directory / name
            path.write_text(text.format(root=self.root), encoding="utf-8")
            path.chmod(0o755)

    def _start(self, output: int) -> subprocess.Popen[bytes]:
        env = test_environment(self.payload)
        env["PATH"] = f"{self.root}/bin:{env['PATH']}"
        script = self.script
        workdir = self.payload["workdir"] if Path(self.payload["workdir"]).is_dir() else "/"
        return subprocess.Popen(
            ["/bin/bash", script], env=env, cwd=workdir, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )

    def _serve(self, bash: subprocess.Popen[bytes], requests: int) -> str | None:
        """Answer requests until the script ends. Returns what prevented that, or None."""
        poller = select.poll()
        poller.register(requests, select.POLLIN)
        buffer = b""
        while bash.poll() is None:
            if time.monotonic() >= self.deadline:
                _kill_session(bash.pid)
                bash.wait()
                return f"{Path(self.script).name} did not end within {self.payload['timeout_s']} s"
            if poller.poll(5):  # short: ends of children and of the script are seen between polls
                *lines, buffer = (buffer + os.read(requests, 4096)).split(b"\n")
                for line in lines:
                    if line.isdigit():
                        self._stand_in(int(line))
            self._reap()
        return None

    def _stand_in(self, waiting: int) -> None:
        pid = os.fork()
        if pid == 0:
            _interpreter_main(waiting, f"{self.root}/bin:")
        self.children[pid] = waiting

    def _reap(self) -> None:
        """Hand the exit status of finished interpreters to the scripts that wait for them."""
        for child, waiting in list(self.children.items()):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                del self.children[child]
                code = os.waitstatus_to_exitcode(status)
                self.replies[waiting] = code if code >= 0 else 128 - code
        for waiting, code in list(self.replies.items()):
            try:
                reply = os.open(self.root / str(waiting), os.O_WRONLY | os.O_NONBLOCK)
            except OSError:  # not reading yet, or gone
                if not Path("/proc", str(waiting)).exists():
                    del self.replies[waiting]
                continue
            os.write(reply, f"{code}\n".encode())
            os.close(reply)
            del self.replies[waiting]

    def _files(self) -> dict[str, str]:
        found = {}
        for name in RESULT_FILES:
            text = _read_regular(self.logs / name)
            if text is not None:
                found[name] = text
        return found


def _kill_session(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # the latter for one that has not made its session yet
        with suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def _read_regular(path: Path) -> str | None:
    """Text of a small regular file; None for anything else, however it got there."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as stream:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > FILE_LIMIT_BYTES:
            return None
        return stream.read(FILE_LIMIT_BYTES).decode(errors="replace")


def _tail(path: Path) -> str:
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - OUTPUT_LIMIT_BYTES))
        return stream.read().decode(errors="replace")


# ----------------------------------------------------------------------------------------------------------- the interpreter's part
def _interpreter_main(waiting: int, shim_path: str) -> NoReturn:
    """Become the Python that process ``waiting`` asked for. Leaves through ``os._exit`` with its exit status."""
    code = 127
    try:
        os.setsid()
        proc = Path("/proc", str(waiting))
        argv = [os.fsdecode(part) for part in (proc / "cmdline").read_bytes().split(b"\0")[1:-1]]  # after the shim's own interpreter
        environ = [part.partition(b"=") for part in (proc / "environ").read_bytes().split(b"\0") if part]
        os.environ.clear()
        os.environ.update({os.fsdecode(name): os.fsdecode(value) for name, _, value in environ})
        # Programs that the tests start find the sandbox's own python3, as they do on the fast path.
        os.environ["PATH"] = os.environ.get("PATH", "").removeprefix(shim_path)
        os.chdir((proc / "cwd").readlink())
        for fd, copy, flags in ((0, 7, os.O_RDONLY), (1, 8, os.O_WRONLY | os.O_APPEND), (2, 9, os.O_WRONLY | os.O_APPEND)):
            os.dup2(os.open(proc / "fd" / str(copy), flags), fd)
        os.closerange(3, 1 << 16)
        sys.dont_write_bytecode = True
        code = _exit_status(argv)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # closed by the program, or nobody reads it any more
                stream.flush()
        os._exit(code)


def _exit_status(argv: Sequence[str]) -> int:
    try:
        return _execute(Path(argv[0]).name, list(argv[1:]))
    except SystemExit as leave:
        if leave.code is None or isinstance(leave.code, int):
            return int(leave.code or 0) & 0xFF
        print(leave.code, file=sys.stderr)  # noqa: T201 - as the interpreter does
        return 1
    except BaseException:  # noqa: BLE001 - this is an interpreter's top level: show the traceback, exit 1
        sys.excepthook(*sys.exc_info())
        return 1


def _execute(name: str, args: list[str]) -> int:
    if name in ("pytest", "py.test"):
        return _pytest_main(args)
    if name == "uv" and args and args[0] in _UV_SETUP:
        return 0
    if name in ("uvx", "uv"):
        if "pytest" not in args:
            raise SystemExit(f"{name}: only running pytest is supported while verifying, got: {' '.join(args)}")
        return _pytest_main(args[args.index("pytest") + 1 :])
    while args and args[0].startswith("-") and args[0] not in ("-m", "-c", "-", "-V", "--version"):
        del args[: 2 if args[0] in _FLAGS_WITH_VALUE else 1]
    if not args or args[0] == "-":
        _run_source(sys.stdin.read(), args or ["-"])
    elif args[0] in ("-V", "--version"):
        print(f"Python {sys.version.split()[0]}")  # noqa: T201 - as the interpreter does
    elif args[0] == "-c":
        _run_source(args[1], ["-c", *args[2:]])
    elif args[0] == "-m":
        sys.path.insert(0, str(Path.cwd()))
        if args[1] in ("pytest", "py.test"):
            return _pytest_main(args[2:])
        sys.argv = args[1:]
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = args
        sys.path.insert(0, str(Path(args[0]).resolve().parent))
        runpy.run_path(args[0], run_name="__main__")
    return 0


def _run_source(source: str, argv: list[str]) -> None:
    sys.argv = argv
    sys.path.insert(0, "")
    exec(compile(source, "<string>", "exec"), {"__name__": "__main__"})  # the task's own script, in the clone


def _pytest_main(args: list[str]) -> int:
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ.pop("PYTEST_ADDOPTS", None)
    plugins: list[Any] = []
    for index, argument in enumerate(args):
        if argument == "--ctrf" and index + 1 < len(args):
            plugins.append(_CtrfWriter(Path(args[index + 1])))
            del args[index : index + 2]
            break
        if argument.startswith("--ctrf="):
            plugins.append(_CtrfWriter(Path(argument.removeprefix("--ctrf="))))
            del args[index]
            break
    return int(pytest.main(args, plugins=plugins))


class _CtrfWriter:
    """The part of pytest-json-ctrf that test scripts rely on: one status for each test, in Common Test Report Format."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.status: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        known = self.status.get(report.nodeid)
        if report.failed or known == "failed":
            self.status[report.nodeid] = "failed"
        elif report.skipped or hasattr(report, "wasxfail"):
            self.status[report.nodeid] = "skipped"
        elif report.when == "call":
            self.status[report.nodeid] = "passed"

    def pytest_sessionfinish(self) -> None:
        tests = [{"name": name, "status": status} for name, status in self.status.items()]
        self.path.write_text(json.dumps({"results": {"tool": {"name": "pytest"}, "tests": tests}}), encoding="utf-8")
