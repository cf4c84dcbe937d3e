"""What is printed, and how much of it."""

from __future__ import annotations

import re
from pathlib import Path

from t1_env.errors import ShellError
from t1_env.testing.terminal import ALL_SHELLS, CONFIG, CaseTable, Check, Terminal

TABLE = CaseTable("output")

_SEEN = {
    "nul_bytes": (r"printf 'a\000b'", "ab"),
    "invalid_utf8": (r"printf 'bad \377\376 utf8'", "bad \ufffd\ufffd utf8"),
    "utf8_split_across_reads": (r"printf '\342\202'; sleep 0.05; printf '\254'", "€"),
    "utf8_cut_off": (r"printf '\342\202'", "\ufffd"),
    "colours": (r"printf '\033[1;31mred\033[0m plain\n'", "red plain\n"),
    "window_title": (r"printf '\033]0;title\007\033(Btext\n'", "text\n"),
    "progress_bar": (r"printf '10%%\r50%%\r100%%\n'", "100%\n"),
    "progress_bar_unfinished": (r"for i in 1 2 3; do printf '\r%d/3' $i; sleep 0.02; done", "3/3"),
    "line_erased_and_rewritten": (r"printf 'loading...\r\033[Kdone\n'", "done\n"),
    "backspaces": (r"printf 'abc\b\bX\n'", "aXc\n"),
    "carriage_returns_before_newlines": (r"printf 'a\r\nb\r\n'", "a\nb\n"),
    "bell": (r"printf 'bell\a\n'", "bell\n"),
    "no_final_newline": ("printf 'no newline'", "no newline"),
    "only_newlines": (r"printf '\n\n'", "\n\n"),
}


def _seen(text: str, output: str) -> Check:
    def check(t: Terminal) -> None:
        t.answers(text, output)
        t.usable()

    return check


for _name, (_text, _output) in _SEEN.items():
    TABLE.add(_name, f"{_text} shows {_output!r}, as a terminal would.", _seen(_text, _output), ALL_SHELLS)


@TABLE.case(shells=ALL_SHELLS)
def escape_sequences_on_demand(t: Terminal) -> None:
    """With ``keep_ansi`` escape sequences stay in the output; line ends are normalised."""
    with t.another(keep_ansi=True) as other:
        result = other.run(r"printf '\033[31mred\033[0m\r\n'")
        t.equal("output", result.output, "\x1b[31mred\x1b[0m\n")


@TABLE.case(shells=ALL_SHELLS)
def long_output(t: Terminal) -> None:
    """Long output keeps its head and its tail and states the exact number of bytes left out between them."""
    result = t.answers("seq 1 300000")
    size = sum(len(str(i)) + 1 for i in range(1, 300_001))
    t.equal("output_bytes", result.output_bytes, size)
    t.check(result.output.startswith("1\n2\n3\n") and result.output.endswith("299999\n300000\n"), "head or tail is missing")
    marker = re.search(r"\n\[\.\.\. (\d+) bytes elided \.\.\.\]\n", result.output)
    t.check(marker is not None and int(marker[1]) == result.elided_bytes, f"no line states that {result.elided_bytes} bytes are missing")
    assert marker is not None
    t.equal("kept and elided bytes", len(result.output) - len(marker[0]) + result.elided_bytes, size)
    t.check(len(result.output) <= CONFIG.max_output_bytes + 64, f"{len(result.output)} characters were kept")


@TABLE.case()
def output_of_100_megabytes(t: Terminal) -> None:
    """100 MB of output take bounded memory; what was left out is counted exactly, and the log has every byte by its offset."""
    size, before = 100_000_000, _resident_bytes()
    result = t.answers(f"printf '<begin>'; head -c {size} /dev/zero | tr '\\000' x; printf '<end>'")
    grown = _peak_bytes() - before
    t.equal("output_bytes", result.output_bytes, size + 12)
    t.equal("elided_bytes", result.elided_bytes, size + 12 - CONFIG.max_output_bytes)
    t.check(grown < 100 << 20, f"this process grew by {grown >> 20} MiB, expected less than the output")
    t.check(result.output.startswith("<begin>xxx") and result.output.endswith("xxx<end>"), "head or tail is missing")
    t.equal("size of the log's part", result.log_end - result.log_start, size + 12)
    t.equal("beginning of the log's part", t.session.log(result.log_start, 10), b"<begin>xxx")
    t.equal("middle of the log", set(t.session.log(result.log_start + size // 2, 100_000)), {ord("x")})
    t.equal("end of the log's part", t.session.log(result.log_end - 8, 1000), b"xxx<end>")


def _resident_bytes() -> int:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak so far
    return _status_bytes("VmRSS")


def _peak_bytes() -> int:
    return _status_bytes("VmHWM")


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    return 0


@TABLE.case(shells=ALL_SHELLS)
def log_by_offset(t: Terminal) -> None:
    """The log has the terminal's bytes as they were, and each result says where its step lies in it."""
    first = t.answers(r"printf '\033[31mred\033[0m\n'", "red\n")
    second = t.answers(r"printf 'bad \377\n'")
    t.equal("the steps' places", (first.log_end, t.session.log_size), (second.log_start, second.log_end))
    t.equal("first step", t.session.log(first.log_start, first.log_end - first.log_start), b"\x1b[31mred\x1b[0m\r\n")
    t.check(t.session.log(second.log_start).startswith(b"bad \xff\r\n"), f"second step is {t.session.log(second.log_start)!r}")
    t.check(len(t.session.log()) == t.session.log_size - t.session.log_start, "the whole log has another size than it says")
    t.equal("beyond the end", t.session.log(t.session.log_size + 1000, 10), b"")


@TABLE.case(shells=ALL_SHELLS)
def log_is_bounded(t: Terminal) -> None:
    """The log keeps the last ``log_bytes`` and says so when asked for more; 0 keeps nothing."""
    with t.another(log_bytes=1000) as other:
        result = other.answers("seq 1 5000")
        other.equal("bytes kept", other.session.log_size - other.session.log_start, 1000)
        other.check(b"4999\r\n5000\r\n" in other.session.log(other.session.log_start), "the end of the output is not in the log")
        _expect_gone(other, result.log_start)
    with t.another(log_bytes=0) as other:
        result = other.answers("echo unlogged")
        other.check(result.log_end > result.log_start, "offsets are not counted without a log")
        _expect_gone(other, result.log_start)


def _expect_gone(t: Terminal, offset: int) -> None:
    try:
        t.session.log(offset, 1)
    except ShellError:
        return
    t.fail(f"byte {offset} of the log is there, expected a ShellError that says which bytes are kept")


@TABLE.case(shells=ALL_SHELLS)
def nothing_is_lost_or_shifted(t: Terminal) -> None:
    """Outputs of awkward sizes arrive complete and in the step they belong to."""
    sizes = [0, 1, 4095, 4096, 4097, 8191, 20_000, 3, 70_000, 0, 17]
    for i in range(10 * len(sizes)):
        size = sizes[i % len(sizes)]
        command = f"head -c {size} /dev/zero | tr '\\000' y; printf '<{i}>'" if i % 2 else f"printf '%{size}s<{i}>' ''"
        result = t.answers(command)
        t.equal(f"output_bytes of step {i}", result.output_bytes, size + len(f"<{i}>"))
        t.check(result.output.endswith(f"<{i}>"), f"the end of step {i} is missing")


@TABLE.case(shells=ALL_SHELLS)
def printing_the_protocol(t: Terminal) -> None:
    """A program that prints whatever bytes the session itself uses changes nothing."""
    protocol = r"S1\0000\000himBHs\000/x.\000\000L\000\000B\000\000X/y.\000\000"
    t.answers(f"printf '{protocol}'; printf '\\033]7771;t1\\007'; false", code=1)
    t.answers(f"printf '\\033]7771;t1\\007{protocol}'; (exit 3)", code=3)
    result = t.run(r"printf '\033]7771;t1\007'; sleep 0.5; echo slept")
    t.expect(result, "slept\n")
    t.usable()


@TABLE.case()
def writing_to_the_protocol(t: Terminal) -> None:
    """Shell code of the agent that writes to the session's own descriptors fools nobody but itself, for one step at most."""
    t.answers(r"printf 'S99\0000\000h\000/x.\000\000junk' >&502; (exit 3)", "", code=3)
    t.answers("read -r -t 0.1 -u 500 x; echo read", "read\n")
    t.usable()
