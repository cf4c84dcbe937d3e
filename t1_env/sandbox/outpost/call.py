"""The first process of a clone's container: calls one trusted function and reports what it returned.

The container is made of a commit of the agent's files, and nothing of the agent runs in it. The request is one line of JSON on standard
input; the answer is one line of JSON on standard output, which nothing else can write to.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
import traceback
from typing import Any, Final, NoReturn

from t1_env.sandbox import syscalls
from t1_env.sandbox.clone import resolve_entry

REQUEST_LIMIT_BYTES: Final = 1 << 27


def main() -> NoReturn:
    """Answer one request and end; never returns."""
    result_fd = os.dup(1)
    os.set_inheritable(result_fd, False)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)  # programs that the function starts cannot look at this one's memory or descriptors
    request = json.loads(sys.stdin.buffer.readline(REQUEST_LIMIT_BYTES))
    os.dup2(null, 0)
    os.close(null)
    _send(result_fd, _answer(request))
    os._exit(0)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        function = resolve_entry(request["entry"])
        os.environ.clear()
        os.environ.update(request["env"])
        time.tzset()
        tempfile.tempdir = None
        sys.dont_write_bytecode = True
        with contextlib.suppress(OSError):
            os.chdir(request["workdir"])
        return {"payload": function(request["payload"])}
    except BaseException as error:  # noqa: BLE001  (whatever the function raises, SystemExit included, is its caller's to hear of)
        message = "".join(traceback.format_exception_only(error)).strip()
        trace = "".join(traceback.format_tb(error.__traceback__)[-8:])
        return {"error": f"{request['entry']} raised {message}\n{trace}".rstrip()}


def _send(fd: int, answer: dict[str, Any]) -> None:
    try:
        data = json.dumps(answer).encode("ascii")
    except (TypeError, ValueError) as error:
        data = json.dumps({"error": f"the function returned what is not JSON: {error}"}).encode("ascii")
    view = memoryview(data + b"\n")
    while view:
        view = view[os.write(fd, view) :]
