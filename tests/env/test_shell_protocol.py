from __future__ import annotations

import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t1_env.errors import ConfigError
from t1_env.shell import ShellConfig
from t1_env.shell.bash import BashDialect
from t1_env.shell.dialect import ShellName, dialect_for
from t1_env.shell.keys import encode_keys
from t1_env.shell.plain import PosixDialect, ZshDialect
from t1_env.shell.records import ChannelBroken, LoopLeft, RecordReader, ShellLeft, StatusRecord

RECORD = StatusRecord(sequence=7, exit_code=3, flags="himBHs", cwd="/a b")


def test_records_survive_any_cut_and_junk() -> None:
    traps = "trap -- 'echo \nD' DEBUG\ntrap -- 'S1' ERR\n"
    function = "builtin () \n{ \n    echo S\n}\n"
    data = (
        b"S7\x003\0himBHs\0/a b.\0\0" + b"L\0\0" + b"junk\0\0" + f"noise {traps}{function}S8\x000\0hx\0/".encode() + b"\xff.\0\0"
        b"B\0\0" + b"S9\x000\0i\0/.\0Xexport A='1\n2'\n\0\0" + b"X/end.\0\0"
    )
    expected = [
        RECORD,
        LoopLeft(),
        StatusRecord(8, 0, "hx", "/\udcff", functions=function, traps=traps),
        ChannelBroken(),
        StatusRecord(9, 0, "i", "/", exports=b"export A='1\n2'\n"),
        ShellLeft("/end"),
    ]
    for size in (1, 2, 3, len(data)):
        reader = RecordReader()
        assert [record for i in range(0, len(data), size) for record in reader.feed(data[i : i + size])] == expected


@given(st.binary(max_size=200))
def test_any_junk_is_tolerated(data: bytes) -> None:
    reader = RecordReader()
    reader.feed(data)
    reader.feed(b"\0\0\0")
    assert reader.feed(b"\0\0S7\x003\0himBHs\0/a b.\0\0")[-1] == RECORD


def test_command_encoding() -> None:
    encode = BashDialect().encode
    assert encode(1, "echo hi", None) == b"1\0echo hi\0"
    assert encode(2, "a\0b", StatusRecord(1, 0, "himBH", "/")) == b"2\0ab\0"
    assert encode(8, "x", RECORD) == b"8\0__t1_ret 3 '' && :\nx\0"
    assert encode(8, "x", StatusRecord(7, 0, "exhi", "/")) == b"8\0__t1_ret 0 'ex'\nx\0"
    assert encode(8, "x", StatusRecord(7, 0, "h", "/", traps="trap d\n")) == b"8\0__t1_ret 0 '' 'trap d\n'\nx\0"
    assert encode(8, "x", StatusRecord(7, 0, "h", "/", functions="f")) == b"8\0__t1_ret 0 '' '' 'f'\nx\0"
    assert encode(1, "\udcff \ud800", None) == b"1\0? ?\0"
    assert encode(1, "\udcff", None) == b"1\0\xff\0"


def test_command_encoding_in_plain_mode() -> None:
    encode = PosixDialect().encode
    assert encode(1, "echo 'it'", None) == b"case $__t1_seq in 1) ;; *) __t1_seq=1\neval 'echo '\\''it'\\''' 7<&- 8<&- 9>&- ;; esac\n"
    assert b"\neval '{ __t1_ret 3; } 2>|/dev/null && :\nx' 7<&- 8<&- 9>&- ;;" in encode(8, "x", RECORD)
    assert b"set -ex; __t1_ret 0;" in encode(8, "x", StatusRecord(7, 0, "exhi", "/"))
    assert b"__t1_left=$?" in ZshDialect().encode(1, "x", None)


@pytest.mark.parametrize("name", ["bash", "sh", "zsh"])
def test_startup_file_is_what_the_shell_reads(name: ShellName) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed here")
    done = subprocess.run([name, "-n"], input=dialect_for(name).startup_file(), check=True, capture_output=True)
    assert done.stderr == b""


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
        {"log_bytes": -1},
        {"shell": "fish"},
    ],
)
def test_bad_configuration(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        ShellConfig(**options)  # type: ignore[arg-type]
