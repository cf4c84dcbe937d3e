"""The shells of an outpost: each has a thread of its own, so that none waits for another."""

from __future__ import annotations

import zlib
from typing import Final, TypeAlias

from t1_env.errors import SandboxError
from t1_env.sandbox.base import KillsAll
from t1_env.sandbox.outpost import records
from t1_env.sandbox.outpost.frames import Header
from t1_env.sandbox.outpost.workers import Strand
from t1_env.shell.channel import Spawner
from t1_env.shell.config import ShellResult
from t1_env.shell.engine import BashEngine

Answer: TypeAlias = tuple[Header, bytes]
_COMPRESSION: Final = 1


class HostedShell:
    """One shell engine beside its bash.

    Args:
        sandbox: Where it runs.
        config: ``ShellConfig`` as JSON.

    Raises:
        SandboxError: No thread can be started.
    """

    def __init__(self, sandbox: Spawner, config: Header) -> None:
        self._engine = BashEngine(sandbox, records.shell_config_from_json(config))
        self.strand = _strand(sandbox)

    def serve(self, request: Header) -> Answer:
        """Answer a request of this shell; called in its thread.

        Raises:
            T1Error: What the engine raises.
        """
        result: ShellResult | None = None
        match request["op"]:
            case "shell.start":
                self._engine.start()
            case "shell.run":
                result = self._engine.run(request["text"], request["timeout_s"])
            case "shell.keys":
                result = self._engine.keys(request["text"], request["wait_s"])
            case "shell.resize":
                self._engine.resize(request["rows"], request["cols"])
            case "shell.screen":
                pass
            case "shell.log":
                return {}, self._engine.log(request["offset"], request["size"])
            case "shell.close":
                self._engine.close()
                self.strand.end()
                return {}, b""
            case operation:
                raise SandboxError(f"unknown request {operation!r}")
        engine = self._engine
        header: Header = {
            "state": engine.state.value,
            "cwd": engine.cwd,
            "size": engine.size,
            "log": (engine.log_start, engine.log_size),
        }
        if result is not None:
            header["result"] = records.shell_result_to_json(result)
        if not request.get("screen"):
            return header, b""
        # Drawing the screen takes the other side's time too, so it is done only for those who look at it.
        return {**header, "cursor": engine.cursor}, zlib.compress(engine.screen_codes(), _COMPRESSION)

    def end(self) -> None:
        """Close the engine, after the step that is running, and end its thread."""
        self.strand.submit(self._engine.close)
        self.strand.end()


def _strand(sandbox: Spawner) -> Strand:
    """A thread for a shell. Where the agent leaves no room for one, its processes are ended: that is no failure of the machinery."""
    try:
        return Strand("t1-shell")
    except RuntimeError:
        if isinstance(sandbox, KillsAll):
            sandbox.kill_all()
    try:
        return Strand("t1-shell")
    except RuntimeError as error:
        raise SandboxError(f"cannot open a shell: {error}") from error


def screen_from_blob(blob: bytes) -> bytes:
    """The code points again."""
    return zlib.decompress(blob)
