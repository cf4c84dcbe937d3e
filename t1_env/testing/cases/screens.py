"""The terminal as a picture, and programs that paint it."""

from __future__ import annotations

import time
from collections.abc import Callable

from t1_env.testing.terminal import ALL_SHELLS, EXITED, FULLSCREEN, WAITING, CaseTable, Terminal

TABLE = CaseTable("screens")


@TABLE.case(shells=ALL_SHELLS)
def screen_follows_the_output(t: Terminal) -> None:
    """The screen shows what a terminal would, at the place where it would."""
    t.answers("printf '\\033[H\\033[2Jtop\\033[10;20Hmiddle'")
    lines = t.session.screen_text().split("\n")
    t.equal("lines", (lines[0], lines[9]), ("top", " " * 19 + "middle"))
    t.equal("shape", t.session.screen().shape, (24, 80))
    t.equal("cursor", t.session.cursor, (9, 25))


@TABLE.case(shells=ALL_SHELLS)
def resize(t: Terminal) -> None:
    """The terminal's size can be changed, also under a running program, which is told."""
    t.session.resize(40, 100)
    t.answers("stty size", "40 100\n")
    t.equal("shape", t.session.screen().shape, (40, 100))


@TABLE.case()
def resize_under_a_program(t: Terminal) -> None:
    """A running program learns of a new size by a signal."""
    t.waits(t.run("(trap 'stty size' WINCH; while ! read -r line; do :; done)"))
    t.session.resize(30, 90)
    result = t.keys("x\n", wait_s=10)
    t.equal("size", b"30 90" in t.session.log(result.log_start), True)


@TABLE.case()
def killed_program_leaves_a_usable_screen(t: Terminal) -> None:
    """A program that dies on the alternate screen leaves the main one as it was."""
    t.answers("echo before; printf '\\e[?1049h\\e[Hgarbage'", "before\n")
    t.answers("echo after", "after\n")
    text = t.session.screen_text()
    t.check("garbage" not in text and "before" in text, f"the screen is {text!r}")


@TABLE.case()
def less(t: Terminal) -> None:
    """``less`` shows its page, follows keys, and leaves the screen as it was."""
    t.need("less", "seq")
    t.run("printf '\\e[H\\e[2J'; echo before")
    result = t.run("seq 1 500 | LESS= less")
    t.equal("state", result.state, FULLSCREEN)
    t.equal("lines", t.session.screen_text().split("\n")[:2], ["1", "2"])
    t.equal("state", t.keys("G", wait_s=2).state, FULLSCREEN)
    _shows(t, lambda text: "500" in text)
    t.expect(t.keys("q"))
    t.equal("first line", t.session.screen_text().split("\n")[0], "before")


@TABLE.case()
def vim(t: Terminal) -> None:
    """``vim`` (or ``vi``) edits a file by keystrokes, is seen on the screen, and leaves it as it was."""
    editor = "vim" if t.run("command -v vim >/dev/null").exit_code == 0 else "vi"
    t.need(editor)
    path = t.path("vim.txt")
    t.run("printf '\\e[H\\e[2J'; echo before")
    t.equal("state", t.run(f"{editor} -u NONE -N {path}").state, FULLSCREEN)
    _shows(t, lambda text: "~" in text)
    t.keys("ihello vim", wait_s=2)
    _shows(t, lambda text: text.startswith("hello vim"))
    t.keys("Escape", wait_s=1)
    t.expect(t.keys(":wq\r"))
    t.equal("first line", t.session.screen_text().split("\n")[0], "before")
    t.answers(f"cat {path}; rm {path}", "hello vim\n")


@TABLE.case()
def top(t: Terminal) -> None:
    """``top`` is seen on the screen and quits by ``q``."""
    t.need("top")
    if t.run("top -b -n 1 >/dev/null").exit_code != 0:
        t.skip("top does not work in this sandbox")
    t.check(t.run("top").state in (FULLSCREEN, WAITING), "top does not wait for keys")
    _shows(t, lambda text: "load average" in text)
    t.expect(t.keys("q"))
    t.usable()


def _shows(t: Terminal, condition: Callable[[str], bool]) -> None:
    """A program may paint in several strokes: wait for the last."""
    for _ in range(50):
        text = t.session.screen_text()
        if condition(text):
            return
        t.keys("", wait_s=0.2)
    t.fail(f"the screen is {text!r}")


@TABLE.case(shells=ALL_SHELLS)
def cost_does_not_grow_with_history(t: Terminal) -> None:
    """A step with its screen costs the same after 300 turns as at the beginning (not a benchmark: only that it is not O(history))."""
    times = []
    for i in range(310):
        started = time.perf_counter()
        t.answers(f"echo turn {i}; x{i}={i}", f"turn {i}\n")
        t.session.screen()
        times.append(time.perf_counter() - started)
    first, last = sum(sorted(times[:50])[:25]), sum(sorted(times[-50:])[:25])
    t.check(last < 20 * first, f"25 steps took {first:.3f} s at first, {last:.3f} s in the end")


@TABLE.case(shells=ALL_SHELLS)
def directory_that_is_deleted(t: Terminal) -> None:
    """A shell in a directory that was deleted goes on, and so does the one that takes its place."""
    path = t.path("gone")
    t.answers(f"mkdir {path} && cd {path} && rmdir {path}")
    t.answers("echo alive", "alive\n")
    t.expect(t.run("exit 3"), code=3, state=EXITED)
    t.answers("cd /tmp && pwd", "/tmp\n")


@TABLE.case()
def odd_directory_names(t: Terminal) -> None:
    """Directory names with blanks, newlines, quotes and backslashes come back as they are, also after the end of the shell."""
    top = t.path("odd")
    name = top + " \n'\"$x\\"
    t.answers(f'd=$\'{top} \\n\\\'"$x\\\\\'; mkdir -p "$d"; cd "$d"')
    t.equal("cwd", t.session.cwd, name)
    t.expect(t.run("exit"), code=0, state=EXITED)
    t.equal("cwd", t.run("true").cwd, name)
    t.run('cd /; rmdir "$OLDPWD"')
