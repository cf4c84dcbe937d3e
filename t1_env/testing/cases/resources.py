"""A sandbox that its agent has filled up: never an error of the machinery."""

from __future__ import annotations

import time
from typing import Final

from t1_env.protocol import ShellState
from t1_env.sandbox.base import SandboxSpec
from t1_env.testing.terminal import DEAD, EXITED, IDLE, CaseTable, Terminal

TABLE = CaseTable("resources")
_SMALL: Final = SandboxSpec(workdir="/app", storage_mb=16, max_processes=40, memory_mb=128)
_ROUNDS: Final = 20


@TABLE.case(own_sandbox=_SMALL)
def full_disk(t: Terminal) -> None:
    """On a full disk commands fail, the session does not, not even where a shell has to be replaced."""
    t.need_capability("storage_limit")
    result = t.run("cat /dev/zero > /tmp/all; echo more >> /tmp/all")
    t.check(result.exit_code == 1 and "No space left" in result.output, f"it gave {result.exit_code}, {result.output!r}")
    t.answers(f"x='{'y' * 200_000}'; echo ${{#x}}", "200000\n")
    t.expect(t.run("export A=1; exit 3"), code=3, state=EXITED)
    t.answers("echo $A; rm /tmp/all; echo x > /tmp/b; cat /tmp/b", "1\nx\n")


@TABLE.case(own_sandbox=_SMALL)
def fork_bomb(t: Terminal) -> None:
    """A fork bomb is the agent's affair: steps go on to answer with a state, and the agent can end it."""
    t.need_capability("process_limit")
    result = t.run("bomb() { bomb | bomb & }; bomb", timeout_s=3)
    t.check(result.state is not DEAD, "the sandbox died")
    time.sleep(0.5)
    _until_well(t, "kill -9 -1; true")


@TABLE.case(own_sandbox=_SMALL)
def fork_bomb_that_takes_the_shell_along(t: Terminal) -> None:
    """A shell that dies while a fork bomb leaves no room for another is replaced all the same."""
    t.need_capability("process_limit")
    t.run("export A=1")
    t.run("cat > /tmp/bomb <<'E'\nwhile :; do sh /tmp/bomb & done\nE\nsh /tmp/bomb & true", timeout_s=3)
    time.sleep(1)
    for _ in range(3):
        t.check(t.run("kill -9 $$", timeout_s=5).state is not DEAD, "the sandbox died")
    _until_well(t, "kill -9 -1; true")


@TABLE.case(own_sandbox=_SMALL)
def out_of_memory(t: Terminal) -> None:
    """A program that takes all memory is killed, or refused more; the session goes on."""
    t.need_capability("memory_limit")
    result = t.run("tail /dev/zero", timeout_s=60)
    t.check(result.exit_code in (1, 137) or result.state is EXITED, f"it gave {result.exit_code}, {result.output[-200:]!r}")
    t.check(result.state is not DEAD, "the sandbox died")
    _until_well(t, "true")


@TABLE.case(own_sandbox=_SMALL)
def out_of_memory_in_the_shell(t: Terminal) -> None:
    """A shell that takes all memory is killed and replaced."""
    t.need_capability("memory_limit")
    result = t.run("x=$(tr '\\000' y < /dev/zero)", timeout_s=60)
    t.check(result.state in (IDLE, EXITED), f"state is {result.state}")
    _until_well(t, "unset x")


@TABLE.case(own_sandbox=_SMALL)
def kill_everything(t: Terminal) -> None:
    """``kill -9 -1`` reaches nothing that the sandbox needs."""
    t.need_capability("process_limit")
    t.run("sleep 99.701 & sleep 99.702 & true")
    t.check(t.run("kill -9 -1; echo alive").state in (IDLE, EXITED), "the sandbox did not survive")
    t.usable()
    t.await_running("99.701", 0)


def _until_well(t: Terminal, remedy: str) -> None:
    """The agent cleans up, in a few tries: every step answers with a state, and in the end programs can be started again."""
    states: list[ShellState] = []
    for _ in range(_ROUNDS):
        states.append(t.run(remedy, timeout_s=5).state)
        t.check(states[-1] is not DEAD, "the sandbox died")
        if t.run("/bin/echo well", timeout_s=10).output.endswith("well\n"):
            t.usable()
            return
        time.sleep(0.3)
    t.fail(f"no program could be started any more; states: {states}")
