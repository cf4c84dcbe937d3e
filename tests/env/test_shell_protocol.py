from __future__ import annotations

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t1_env.errors import ConfigError
from t1_env.shell import ShellConfig
from t1_env.shell.bash import LoopLeft, RecordReader, StatusRecord, encode_command, startup_file
from t1_env.shell.keys import encode_keys

RECORD = StatusRecord(sequence=7, exit_code=3, flags="himBHs", cwd="/a b", debug_trap=b"")


def test_records_survive_any_cut_and_junk() -> None:
    data = b"S7\x003\0himBHs\0/a b.\0\0" + b"L\0\0" + b"junk\0\0" + b"noise trap -- 'echo \nD' DEBUG\nS8\x000\0hx\0/\xff.\0\0"
    expected = [RECORD, LoopLeft, StatusRecord(8, 0, "hx", "/\udcff", b"trap -- 'echo \nD' DEBUG\n")]
    for size in (1, 2, 3, len(data)):
        reader = RecordReader()
        records = [record for i in range(0, len(data), size) for record in reader.feed(data[i : i + size])]
        assert [type(record) if isinstance(record, LoopLeft) else record for record in records] == expected


@given(st.binary(max_size=200))
def test_any_junk_is_tolerated(data: bytes) -> None:
    reader = RecordReader()
    reader.feed(data)
    reader.feed(b"\0\0\0")
    assert reader.feed(b"\0\0S7\x003\0himBHs\0/a b.\0\0")[-1] == RECORD


def test_command_encoding() -> None:
    assert encode_command(1, "echo hi", None) == b"1\0echo hi\0"
    assert encode_command(2, "a\0b", StatusRecord(1, 0, "himBH", "/", b"")) == b"2\0ab\0"
    assert encode_command(8, "x", RECORD) == b"8\0__t1_ret 3 '' && :\nx\0"
    assert encode_command(8, "x", StatusRecord(7, 0, "exhi", "/", b"")) == b"8\0__t1_ret 0 'ex'\nx\0"
    assert encode_command(8, "x", StatusRecord(7, 0, "h", "/", b"trap -- 'd' DEBUG\n")) == b"8\0trap -- 'd' DEBUG\nx\0"
    assert encode_command(1, "\udcff \ud800", None) == b"1\0? ?\0"
    assert encode_command(1, "\udcff", None) == b"1\0\xff\0"


def test_startup_file_is_bash() -> None:
    assert subprocess.run(["bash", "-n"], input=startup_file(), check=True, capture_output=True).stderr == b""


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("Enter", b"\r"), ("Escape", b"\x1b"), ("Tab", b"\t"), ("BTab", b"\x1b[Z"), ("BSpace", b"\x7f"), ("Space", b" "), ("C-c", b"\x03"),
        ("C-C", b"\x03"), ("C-d", b"\x04"), ("C-z", b"\x1a"), ("C-\\", b"\x1c"), ("C-[", b"\x1b"), ("C-Space", b"\0"), ("C-?", b"\x7f"),
        ("M-x", b"\x1bx"), ("C-M-x", b"\x1b\x18"), ("M-Enter", b"\x1b\r"), ("S-a", b"A"), ("Up", b"\x1b[A"), ("C-Up", b"\x1b[1;5A"),
        ("S-Left", b"\x1b[1;2D"), ("Home", b"\x1b[H"), ("PageUp", b"\x1b[5~"), ("PPage", b"\x1b[5~"), ("F1", b"\x1bOP"),
        ("F5", b"\x1b[15~"),
        ("F12", b"\x1b[24~"), ("ls -l\n", b"ls -l\n"), ("", b""), ("enter", b"enter"), ("C-", b"C-"), ("C-cc", b"C-cc"), ("C-1", b"C-1"),
        ("F13", b"F13"), ("é漢", "é漢".encode()), ("\x03", b"\x03"), ("M-é", b"\x1b" + "é".encode()), ("\ud800", b"?"),
    ],
)  # fmt: skip
def test_keys(name: str, data: bytes) -> None:
    assert encode_keys(name) == data


def test_cursor_keys_in_application_mode() -> None:
    assert encode_keys("Up", application_cursor=True) == b"\x1bOA"
    assert encode_keys("End", application_cursor=True) == b"\x1bOF"
    assert encode_keys("C-Up", application_cursor=True) == b"\x1b[1;5A"


@pytest.mark.parametrize(
    "options",
    [
        {"rows": 0},
        {"cols": 5000},
        {"timeout_s": 0},
        {"timeout_s": float("nan")},
        {"max_output_bytes": 3},
        {"interrupt_grace_s": -1},
        {"quiet_timeout_s": 0},
    ],
)
def test_bad_configuration(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        ShellConfig(**options)  # type: ignore[arg-type]
