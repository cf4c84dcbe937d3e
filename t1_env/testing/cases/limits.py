"""Commands that do not end by themselves."""

from __future__ import annotations

import time

from t1_env.testing.terminal import ALL_SHELLS, EXITED, IDLE, CaseTable, Terminal

TABLE = CaseTable("limits")


@TABLE.case(shells=ALL_SHELLS)
def sleep_with_a_time_limit(t: Terminal) -> None:
    """``sleep 100`` with a limit of 1 s: partial output is kept, the rest of the line is not run, nothing is left running."""
    t.run("sleep 99.401 & true")  # a job of an earlier step: not to be touched
    result = t.expires(t.run("echo partial; sleep 100.402; echo not this", timeout_s=1))
    t.check(result.output.startswith("partial\n") and "not this" not in result.output, f"output is {result.output!r}")
    t.check(1 <= result.seconds < 60, f"it took {result.seconds} s")
    t.answers("echo $?", "130\n")
    t.await_running("100.402", 0)
    t.await_running("99.401", 1)
    t.run("kill $!; wait")


@TABLE.case(shells=ALL_SHELLS)
def time_limit_on_a_builtin_loop(t: Terminal) -> None:
    """A loop of the shell's own is ended, and the shell keeps its state."""
    t.run("x=kept")
    t.expires(t.run("while :; do :; done", timeout_s=0.3))
    t.answers("echo $x", "kept\n")


@TABLE.case(shells=ALL_SHELLS)
def limit_on_silence(t: Terminal) -> None:
    """A limit on the time without output, beside the one on the whole time."""
    with t.another(quiet_timeout_s=1.5) as other:
        other.answers("for i in 1 2 3 4 5 6; do echo $i; sleep 0.3; done", "1\n2\n3\n4\n5\n6\n")
        result = other.expires(other.run("echo a; sleep 100.403"))
        other.check(1.5 <= result.seconds < 60, f"it took {result.seconds} s")
        other.usable()


@TABLE.case(shells=ALL_SHELLS)
def shell_that_ignores_signals(t: Terminal) -> None:
    """``trap '' INT TERM; sleep 100`` ends at its limit; the session is usable."""
    result = t.run("trap '' INT TERM; sleep 100.404", timeout_s=0.5)
    t.expires(result, state=result.state)
    t.check(result.state in (IDLE, EXITED), f"state is {result.state}")
    t.usable()
    t.await_running("100.404", 0)


@TABLE.case()
def loop_that_ignores_signals(t: Terminal) -> None:
    """A shell that cannot be brought back from its loop is replaced, with directory and exported variables."""
    t.run("export KEPT=1; cd /usr")
    t.expires(t.run("trap '' INT TERM; while :; do sleep 0.05; done", timeout_s=0.3), state=EXITED)
    t.answers("echo $KEPT; pwd", "1\n/usr\n")


@TABLE.case(shells=ALL_SHELLS)
def program_that_ignores_signals(t: Terminal) -> None:
    """A program that ignores every signal it can is killed; the shell keeps its state."""
    t.run("x=kept")
    t.expires(t.run("(trap '' INT QUIT TERM HUP; exec sleep 100.405)", timeout_s=0.3))
    t.await_running("100.405", 0)
    t.answers("echo $x", "kept\n")


@TABLE.case()
def program_in_a_session_of_its_own(t: Terminal) -> None:
    """What moved to a session of its own ends with its command too."""
    t.need("setsid")
    t.expires(t.run("setsid -w sh -c 'trap \"\" INT; sleep 100.406'; true", timeout_s=0.5))
    t.await_running("100.406", 0)


@TABLE.case()
def limit_with_a_prompt_of_the_agents_own(t: Terminal) -> None:
    """The session comes back from a time limit although the command replaced the prompt."""
    t.expires(t.run("PS1=x; PROMPT_COMMAND=; sleep 100.407", timeout_s=0.5))
    t.answers("echo back", "back\n")


@TABLE.case()
def stopped_shell(t: Terminal) -> None:
    """A shell that stops itself is replaced."""
    t.expires(t.run("export A=1; kill -STOP $$", timeout_s=0.5), state=EXITED)
    t.answers("echo new", "new\n")


@TABLE.case(shells=ALL_SHELLS)
def output_without_end(t: Terminal) -> None:
    """A program that prints without end is ended at the limit, and the next step is clean."""
    result = t.expires(t.run("yes", timeout_s=0.5))
    t.check(result.output.startswith("y\ny\n") and result.output_bytes > 1000, f"output is {result.output[:100]!r}")
    t.answers("echo clean", "clean\n")


@TABLE.case()
def slow_start_of_the_next_step(t: Terminal) -> None:
    """Time between two steps does not count."""
    with t.another(quiet_timeout_s=0.6) as other:
        other.answers("true")
        time.sleep(1.0)
        other.answers("echo fine", "fine\n")
