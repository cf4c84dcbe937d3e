"""The end of the shell, and of the sandbox."""

from __future__ import annotations

import threading
import time

from t1_env.errors import ShellError
from t1_env.sandbox.base import SandboxSpec
from t1_env.testing.terminal import ALL_SHELLS, BASH, DEAD, EXITED, CaseTable, Check, Terminal

TABLE = CaseTable("endings")


@TABLE.case(shells=ALL_SHELLS)
def exit_with_a_status(t: Terminal) -> None:
    """``exit 3`` is reported with its status; a new shell has the directory and the exported variables, and nothing else."""
    t.run("export A='x y\n\"z'; cd /usr; B=local; f() { :; }")
    result = t.expect(t.run("echo bye; exit 3"), "bye\n", code=3, state=EXITED)
    t.equal("cwd", result.cwd, "/usr")
    t.answers('echo "$A" ${B-unset}; pwd', 'x y\n"z unset\n/usr\n')


@TABLE.case()
def export_in_the_last_command(t: Terminal) -> None:
    """What the very command that ends the shell exported, and where it went, is kept."""
    t.expect(t.run("export A=1; cd /usr; exit 4"), code=4, state=EXITED)
    t.answers("echo $A; pwd", "1\n/usr\n")
    t.expect(t.run("set -e; export B=2; cd /; false"), code=1, state=EXITED)
    t.answers("echo $A $B; pwd", "1 2\n/\n")


def _ends(text: str, code: int) -> Check:
    def check(t: Terminal) -> None:
        t.run("export A=1")
        t.expect(t.run(text), code=code, state=EXITED)
        t.answers("echo $A", "1\n")

    return check


_ENDINGS = {
    "exec_of_a_program": ("exec sh -c 'exit 7'", 7),
    "exec_of_true": ("exec true", 0),
    "killed_shell": ("kill -9 $$", 137),
    "errexit": ("set -e; false", 1),
}
for _name, (_text, _code) in _ENDINGS.items():
    _shells = ALL_SHELLS if _name != "errexit" else BASH
    TABLE.add(_name, f"{_text} ends the shell: reported with status {_code}, a new one stands ready.", _ends(_text, _code), _shells)


@TABLE.case(shells=ALL_SHELLS)
def exec_of_python(t: Terminal) -> None:
    """``exec python3 -c ...`` takes the shell's place and ends: its output and status are reported."""
    t.need("python3")
    t.expect(t.run("exec python3 -c 'print(\"instead\"); raise SystemExit(9)'"), "instead\n", code=9, state=EXITED)
    t.usable()


@TABLE.case(shells=ALL_SHELLS)
def exec_of_a_program_that_reads(t: Terminal) -> None:
    """A program in the shell's place is used like any other, until it ends."""
    t.waits(t.run("exec cat"))
    t.keys("hello\n", wait_s=2)
    t.expect(t.keys("C-d"), code=0, state=EXITED)
    t.answers("echo new", "new\n")


@TABLE.case(shells=ALL_SHELLS)
def killed_between_steps(t: Terminal) -> None:
    """A shell that dies while nobody looks is reported by the next step, which does not run its command."""
    t.run("(sleep 0.2; kill -9 $$) & true")
    for _ in range(100):
        time.sleep(0.4)
        if (result := t.run("echo heard")).state is EXITED:
            break
        t.equal("output", result.output, "heard\n")  # not dead yet
    t.expect(result, code=137, state=EXITED)
    t.check("heard" not in result.output, f"output is {result.output!r}")
    t.answers("echo new", "new\n")


@TABLE.case(shells=("bash", "sh"))  # zsh itself asks for a second `exit` then
def exit_with_a_job_that_holds_the_terminal(t: Terminal) -> None:
    """A background job that keeps the terminal open does not delay the report."""
    t.run("(trap '' HUP; exec sleep 99.501) & true")
    started = time.monotonic()
    t.equal("state", t.run("exit").state, EXITED)
    t.check(time.monotonic() - started < 60, "the end of the shell was noticed late")
    t.usable()


@TABLE.case(shells=("bash", "sh"))
def exit_trap(t: Terminal) -> None:
    """An EXIT trap runs when the shell ends, and its output is in the last result."""
    t.run("trap 'echo bye' EXIT")
    result = t.expect(t.run("exit 4"), code=4, state=EXITED)
    t.check("bye" in result.output, f"output is {result.output!r}")


@TABLE.case(shells=ALL_SHELLS)
def life_cycle(t: Terminal) -> None:
    """A session is started once, closed as often as one likes, and may be started again; unstarted it raises ``ShellError``."""
    for action, expected in ((lambda: t.session.start(), "already started"), (lambda: t.session.run("true"), "not started")):
        try:
            action()
        except ShellError as error:
            t.check(expected in str(error), f"the message is {error}")
        else:
            t.fail(f"expected a ShellError that says {expected!r}")
        t.session.close()
        t.session.close()
    t.session.start()
    t.answers("echo again", "again\n")


@TABLE.case(own_sandbox=SandboxSpec(workdir="/app"))
def dead_sandbox(t: Terminal) -> None:
    """In a sandbox that is gone every step answers ``sandbox_dead``, and remembers where it was."""
    t.run("cd /usr")
    t.sandbox.close()
    for result in (t.run("echo x"), t.keys("x", wait_s=1)):
        t.expect(result, code=None, state=DEAD)
    t.equal("cwd", t.session.cwd, "/usr")


@TABLE.case(own_sandbox=SandboxSpec(workdir="/app"))
def sandbox_that_dies_during_a_command(t: Terminal) -> None:
    """A sandbox that goes during a step ends the step as ``sandbox_dead``."""
    timer = threading.Timer(0.5, t.sandbox.close)
    timer.start()
    result = t.run("echo begun; sleep 99.502")
    timer.join()
    t.expect(result, code=None, state=DEAD)
    t.check(result.output in ("begun\n", ""), f"output is {result.output!r}")  # a connection may take it along
