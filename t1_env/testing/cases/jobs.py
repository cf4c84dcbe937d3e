"""Background jobs, and what they print when nobody is looking."""

from __future__ import annotations

import time

from t1_env.testing.terminal import ALL_SHELLS, LONG_S, RUNNING, CaseTable, Terminal

TABLE = CaseTable("jobs")


@TABLE.case(shells=ALL_SHELLS)
def background_job_that_holds_the_terminal(t: Terminal) -> None:
    """A background job that keeps standard output open does not keep the step open."""
    started = time.monotonic()
    result = t.run("(sleep 99.201; echo never) & echo now")
    t.check(result.output.endswith("now\n") and result.exit_code == 0, f"output is {result.output!r}")
    t.answers("echo next", "next\n")
    t.await_running("99.201", 1)
    t.check(time.monotonic() - started < 90, "the steps waited for the job")
    t.run("kill $!; wait")


@TABLE.case()
def list_of_jobs(t: Terminal) -> None:
    """``jobs`` lists what runs, and no command that has long ended."""
    t.run("sleep 99.202 & sleep 99.203 &")
    t.run("false; ls / | wc -l")
    result = t.answers("jobs | wc -l", "2\n")
    t.answers("kill %1 %2; wait")
    t.check(result.exit_code == 0, "jobs failed")


@TABLE.case(shells=ALL_SHELLS)
def late_output(t: Terminal) -> None:
    """What arrives after a command ended belongs to the next step and is never lost."""
    path = t.path("fifo")
    t.answers(f"mkfifo {path}")
    t.run(f"(read x < {path}; echo late; echo done > {path}) & true")
    t.answers(f"echo go > {path}; read x < {path}; rm {path}")  # printed while this step ran, or before the next
    with t.another(timeout_s=LONG_S) as other:
        other.run("(sleep 0.2; echo late) & true")
        time.sleep(1.5)
        result = other.answers("echo next")
        t.check(result.output.replace("late\n", "", 1).endswith("next\n") and "late\n" in result.output, f"output is {result.output!r}")


@TABLE.case()
def late_output_larger_than_a_terminal_holds(t: Terminal) -> None:
    """A background job that prints 200 kB between two steps waits for the next ones; every byte arrives, in order."""
    t.run("(seq 100000 129999; echo end) & true")
    time.sleep(0.5)
    seen = b""
    for _ in range(200):
        t.run("sleep 0.05")
        seen = t.session.log()
        if b"end\r\n" in seen:
            break
    numbers = [int(line) for line in seen.split() if line.isdigit() and len(line) == 6]
    t.equal("numbers", numbers, list(range(100_000, 130_000)))


@TABLE.case()
def flood_in_the_background(t: Terminal) -> None:
    """A job that prints without end neither hangs the steps nor fills the memory."""
    t.run("yes flood & true")
    t.check(t.run("echo through").exit_code == 0, "expected exit code 0")
    t.check(t.run("kill %1; wait; true").exit_code == 0, "expected exit code 0")
    t.run("true")
    t.answers("echo quiet", "quiet\n")


@TABLE.case(shells=ALL_SHELLS)
def program_that_ends_between_steps(t: Terminal) -> None:
    """A command that was left running after ``keys`` and ends before the next step is over by then, its output kept."""
    t.equal("state", t.keys("sleep 0.4; echo over\n", wait_s=0.05).state, RUNNING)
    time.sleep(1.5)
    result = t.run("echo next")
    t.expect(result, "over\nnext\n")


@TABLE.case()
def stopped_job_goes_on(t: Terminal) -> None:
    """A job stopped by ^Z stays stopped until ``fg`` or ``bg``, also when the sandbox is frozen and thawed in between."""
    t.keys("sleep 99.204\n", wait_s=0.5)
    t.equal("exit code", t.keys("C-z").exit_code, 148)
    if "clone" in getattr(t.sandbox, "capabilities", ()):
        frozen = t.need_sandbox().run_in_clone("os.path:exists", "/tmp")
        t.equal("result of a verification", (frozen.error, frozen.payload), (None, True))
    t.answers("jobs -s | wc -l", "1\n")
    t.answers("bg >/dev/null; jobs -r | wc -l", "1\n")
    t.equal("state", t.keys("fg\n", wait_s=0.5).state, RUNNING)
    t.equal("exit code", t.keys("C-c").exit_code, 130)
    t.answers("jobs | wc -l", "0\n")
