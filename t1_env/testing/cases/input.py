"""Programs that want input, and keystrokes."""

from __future__ import annotations

import textwrap

from t1_env.testing.terminal import ALL_SHELLS, CONTINUATION, EXITED, IDLE, RUNNING, WAITING, CaseTable, Check, Terminal

TABLE = CaseTable("input")


@TABLE.case(shells=ALL_SHELLS)
def read_builtin(t: Terminal) -> None:
    """``read x`` waits for input, and keystrokes reach it."""
    t.waits(t.run("printf 'name? '; read x; echo got:$x"), "name? ")
    t.expect(t.keys("bob\n"), "bob\ngot:bob\n")
    t.answers("echo $x", "bob\n")


@TABLE.case(shells=ALL_SHELLS)
def python_input(t: Terminal) -> None:
    """Python's ``input()`` waits for input, and ``run`` types a line into it."""
    t.need("python3")
    t.waits(t.run('python3 -c \'print("hi " + input("name: "))\''), "name: ")
    t.expect(t.run("eve"), "eve\nhi eve\n")


@TABLE.case()
def password_prompt(t: Terminal) -> None:
    """What is typed at a prompt without echo is not in the output."""
    t.waits(t.run("read -s -p 'password: ' p"), "password: ")
    t.expect(t.run("secret"), "")
    t.answers("echo $p", "secret\n")


@TABLE.case(shells=ALL_SHELLS)
def pipeline_that_reads_the_terminal(t: Terminal) -> None:
    """Any program of a pipeline may be the one that waits; ^D is the end of its input."""
    t.waits(t.run("cat | tr a-z A-Z"))
    t.keys("abc\n", wait_s=2)
    t.expect(t.keys("C-d"))
    t.check(b"ABC" in t.session.log(), "the pipeline did not get what was typed")


@TABLE.case(shells=ALL_SHELLS)
def end_of_file_key_on_a_program(t: Terminal) -> None:
    """^D ends a program that reads."""
    t.waits(t.run("cat"))
    t.expect(t.keys("C-d"))


@TABLE.case()
def end_of_file_key_on_a_builtin_loop(t: Terminal) -> None:
    """^D ends a loop of ``read``."""
    t.waits(t.run("while read -r line; do echo got:$line; done; echo end"))
    result = t.keys("one\n", wait_s=5)
    t.waits(result)
    t.check("got:one\n" in result.output, f"output is {result.output!r}")
    t.check(t.expect(t.keys("C-d")).output.endswith("end\n"), "the loop did not end")


def _signal_key(key: str, code: int) -> Check:
    def on_a_program(t: Terminal) -> None:
        t.equal("state", t.keys("sleep 99.301\n", wait_s=1).state, RUNNING)
        t.check(t.expect(t.keys(key), code=code).state is IDLE, "not at the prompt")
        t.usable()
        t.run("kill -9 %1 2>/dev/null")

    return on_a_program


for _name, _key, _code in (("interrupt", "C-c", 130), ("quit", "C-\\", 131), ("stop", "C-z", 148)):
    _promise = f"{_key} on a program gives exit code {_code} and the prompt back."
    TABLE.add(f"{_name}_key_on_a_program", _promise, _signal_key(_key, _code), ALL_SHELLS)


@TABLE.case(shells=ALL_SHELLS)
def interrupt_key_on_a_builtin_loop(t: Terminal) -> None:
    """^C ends a loop that the shell itself runs."""
    t.answers("x=kept")
    t.equal("state", t.keys("while :; do :; done\n", wait_s=0.3).state, RUNNING)
    ended = t.keys("C-c")
    # zsh says 2 where the signal finds it between two commands of the loop
    t.expect(ended, code=2 if t.shell == "zsh" and ended.exit_code == 2 else 130)
    t.answers("echo $x", "kept\n")


@TABLE.case(shells=ALL_SHELLS)
def interrupt_key_at_the_very_beginning(t: Terminal) -> None:
    """^C that comes while a command is only about to begin may come too early, but does no harm: the next one ends it."""
    t.answers("x=kept")
    for _ in range(20):
        result = t.keys("while :; do :; done\n", wait_s=0)
        for _ in range(100):
            result = t.keys("C-c", wait_s=0.5)
            if result.state is IDLE:
                break
        t.check(result.state is IDLE and bool(result.exit_code), f"the loop ended with {result.exit_code} and state {result.state}")
        t.answers("echo $x", "kept\n")


@TABLE.case()
def quit_and_stop_keys_on_a_builtin_loop(t: Terminal) -> None:
    r"""^\ and ^Z do nothing to a loop that the shell itself runs, as at any interactive prompt; ^C still ends it."""
    t.equal("state", t.keys("while :; do :; done\n", wait_s=0.3).state, RUNNING)
    for key in ("C-\\", "C-z"):
        t.equal("state", t.keys(key, wait_s=0.3).state, RUNNING)
    t.expect(t.keys("C-c"), code=130)
    t.usable()


@TABLE.case()
def stop_key_inside_a_loop(t: Terminal) -> None:
    """^Z on a program that a loop runs stops the program and leaves the loop; ``fg`` takes it up again."""
    t.equal("state", t.keys("for i in 1 2; do sleep 99.302; done\n", wait_s=1).state, RUNNING)
    t.expect(t.keys("C-z"), code=148)
    t.equal("state", t.keys("fg\n", wait_s=0.3).state, RUNNING)
    t.expect(t.keys("C-c"), code=130)
    t.usable()


@TABLE.case()
def keys_at_the_prompt(t: Terminal) -> None:
    """Keys typed at the prompt make up a command, which Enter runs; ^C drops the line, ^D on an empty one ends the shell."""
    t.equal("state", t.keys("echo a", wait_s=0).state, IDLE)
    t.keys("bX", wait_s=0)
    t.keys("BSpace", wait_s=0)
    t.expect(t.keys("Enter"), "ab\n")
    t.keys("touch /tmp/never", wait_s=0)
    t.keys("C-c", wait_s=0)
    t.equal("output", t.keys("Enter", wait_s=0.1).output, "")
    t.equal("state", t.keys("C-d").state, EXITED)


@TABLE.case(shells=ALL_SHELLS)
def sleeping_program_is_not_waiting(t: Terminal) -> None:
    """A program that only sleeps is not taken for one that waits for input."""
    t.answers("sleep 0.7; echo done", "done\n")


@TABLE.case()
def text_for_a_program_that_does_not_read(t: Terminal) -> None:
    """What was typed into a program that never read it is gone with the program."""
    t.equal("state", t.keys("sleep 99.303\n", wait_s=0.3).state, RUNNING)
    t.expires(t.run("echo never", timeout_s=0.3))
    t.answers("read -t 0.1 x; echo $x", "\n")


@TABLE.case()
def flow_control_keys(t: Terminal) -> None:
    """^S does not stop the terminal for good."""
    t.waits(t.run("cat"))
    t.keys("C-s", wait_s=0.1)
    t.keys("C-c")
    t.answers("echo flows", "flows\n")


@TABLE.case()
def bash_inside(t: Terminal) -> None:
    """An interactive bash inside is entered, used (also with a command over two lines) and left."""
    t.waits(t.run("bash --norc"))
    result = t.run("echo in $((1+1))")
    t.check("in 2\n" in t.waits(result).output, f"output is {result.output!r}")
    t.equal("state", t.run("for i in 7 8").state, CONTINUATION)
    result = t.run("do echo n$i; done")
    t.check("n7\nn8\n" in t.waits(result).output, f"output is {result.output!r}")
    t.expect(t.run("exit 5"), code=5)
    t.answers("echo out", "out\n")


@TABLE.case(shells=ALL_SHELLS)
def python_inside(t: Terminal) -> None:
    """An interactive Python inside is entered, used (also with a block) and left."""
    t.need("python3")
    t.waits(t.run("python3 -q"))
    result = t.run("print(6*7)")
    t.check("42\n" in t.waits(result).output, f"output is {result.output!r}")
    t.equal("state", t.run("def f():").state, CONTINUATION)
    t.equal("state", t.run("    return 'block'").state, CONTINUATION)
    t.equal("state", t.run("").state, WAITING)
    t.check("block" in t.run("f()").output, "the function was not defined")
    t.expect(t.run("raise SystemExit(3)"), code=3)
    t.usable()


@TABLE.case()
def su_inside(t: Terminal) -> None:
    """A shell of another user through ``su`` is entered, used and left."""
    t.need("su", "id")
    trial = t.run("su -s /bin/bash nobody -c true", timeout_s=20)
    if trial.exit_code != 0:
        t.skip(f"su does not work in this sandbox: {trial.output.strip()[-200:] or trial.exit_code}")
    t.waits(t.run("su -s /bin/bash nobody"))
    result = t.run("echo I am $(id -un) $((40+2))")
    t.check("I am nobody 42\n" in t.waits(result).output, f"output is {result.output!r}")
    t.expect(t.run("exit 6"), code=6)
    t.answers("id -u", "0\n")


@TABLE.case()
def ssh_inside(t: Terminal) -> None:
    """A shell on another machine through ``ssh`` is entered, used and left."""
    t.need("ssh", "ssh-keygen")
    directory, port = t.path("ssh"), 20_000 + hash(t.path("")) % 20_000
    server = t.answers("PATH=$PATH:/usr/sbin:/usr/local/sbin command -v sshd || echo none").output.strip()
    if server == "none":
        t.skip("sshd is not installed in this sandbox")
    if getattr(t.sandbox, "isolation", "none") != "none":  # never on a machine that is not the sandbox's own
        t.run("mkdir -p /run/sshd; grep -qs ^sshd: /etc/passwd || echo sshd:x:33333:33333::/run/sshd:/bin/false >> /etc/passwd")
    script = f"""
        mkdir -m 700 {directory} && cd {directory} && ssh-keygen -q -t ed25519 -N '' -f host && ssh-keygen -q -t ed25519 -N '' -f user &&
        cp user.pub keys && chmod 600 keys && {server} -f /dev/null -p {port} -h {directory}/host -E {directory}/log \\
            -o ListenAddress=127.0.0.1 -o AuthorizedKeysFile={directory}/keys -o StrictModes=no -o UsePAM=no \\
            -o PidFile={directory}/pid -o PermitRootLogin=yes"""
    client = (
        f"ssh -F none -i {directory}/user -p {port} -o StrictHostKeyChecking=no -o UserKnownHostsFile={directory}/known -o LogLevel=ERROR"
    )
    started = t.run(textwrap.dedent(script), timeout_s=60)
    trial = t.run(f"{client} 127.0.0.1 true", timeout_s=60)
    try:
        if started.exit_code != 0 or trial.exit_code != 0:
            log = t.run(f"tail -n 3 {directory}/log").output.strip()
            t.skip(f"an OpenSSH server does not work in this sandbox: {(log or trial.output or started.output).strip()[-200:]}")
        result = t.run(f"{client} -tt 127.0.0.1 PS1=there: sh")
        t.check(result.state is WAITING, f"state is {result.state}")
        result = t.run("echo over $((40+2))")
        t.check("over 42\n" in t.waits(result).output, f"output is {result.output!r}")
        t.expect(t.run("exit 7"), code=7)
        t.usable()
    finally:
        t.session.close()
        t.session.start()
        t.run(f"kill $(cat {directory}/pid); cd /; rm -rf {directory}")
