from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t1_env.shell.screen import TerminalScreen


def drawn(*pieces: bytes, rows: int = 5, cols: int = 20) -> TerminalScreen:
    screen = TerminalScreen(rows, cols)
    for piece in pieces:
        screen.feed(piece)
    return screen


def cells(screen: TerminalScreen) -> np.ndarray:
    return np.frombuffer(screen.codes(), dtype="<u4")


def test_blank_screen() -> None:
    codes = cells(drawn())
    assert codes.shape == (5 * 20,)
    assert (codes == 32).all()


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"one\r\ntwo", "one\ntwo"),
        (b"\x1b[2;3Hx\x1b[1;1Hy", "y\n  x"),
        (b"".join(b"%d\r\n" % i for i in range(50)), "46\n47\n48\n49"),
        (b"abc\x1b[>4;2m\x1b[?4m\x1b[>c\x1b[=1;1udef", "abcdef"),  # sent by vim and friends; pyte alone raises
        (b"abc\x1b[2;9;9Adef\x1b[1$}x\x1b[!p", "abcdefx"),
        (b"\x1b]0;a title\x07x\x1b]2;another\x1b\\y", "xy"),
        (b"a\x1b[4b", "aaaaa"),
        (b"main\x1b[?1049h\x1b[Halternate", "alternate"),
        (b"main\x1b[?1049h\x1b[Halternate\x1b[2;1Hx\x1b[?1049l!", "main!"),
        (b"main\x1b[?1049h\x1b[?1049hx\x1b[?1049l\x1b[?1049l!", "main!"),
        ("漢字\x1b[1;10H🙂".encode(), "漢 字      🙂"),
        (b"\xe2\x82", ""),
        (b"1\r\n2\r\n3\x1b[1S", "2\n3"),
        (b"1\r\n2\x1b[1T", "\n1\n2"),
        (b"\x1b[3;5r\x1b[rA\x1b[31mB\x1b[0m", "AB"),
        (b"x\x1b[2J\x1b[Hy", "y"),
        (b"a\tb", "a       b"),
    ],
)
def test_drawing(data: bytes, text: str) -> None:
    assert drawn(data).text() == text
    assert drawn(*(data[i : i + 1] for i in range(len(data)))).text() == text
    stepwise = drawn()
    for i in range(len(data)):  # drawn after every byte
        stepwise.feed(data[i : i + 1])
        stepwise.codes()
    assert stepwise.text() == text


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=20), st.from_regex(rb"\x1b\[[?>]?[0-9;]{0,6}[@-~]", fullmatch=True)), max_size=30))
def test_no_bytes_break_it(pieces: list[bytes]) -> None:
    screen = drawn(*pieces)
    assert cells(screen).shape == (5 * 20,)
    row, column = screen.cursor
    assert 0 <= row < 5
    assert 0 <= column < 20


def test_much_output_costs_little_and_ends_right() -> None:
    screen = drawn(rows=24, cols=80)
    for i in range(20_000):
        screen.feed(b"\x1b[32mline %d\x1b[0m\r\n" % i)
    assert screen.text().split("\n")[-1] == "line 19999"
    assert screen.cursor == (23, 0)


def test_plain_text_that_scrolls_off_is_skipped_without_a_trace() -> None:
    data = b"start" + b"".join(b"\r\n%d" % i for i in range(3000))
    quick, slow = drawn(data), drawn()
    for i in range(0, len(data), 7):
        slow.feed(data[i : i + 7])
        slow.codes()
    assert quick.text() == slow.text()
    assert quick.cursor == slow.cursor


def test_switches_among_lost_output_count() -> None:
    screen = drawn(b"main", b"\x1b[?1049h", b"x\r\n" * 60_000, b"\x1b[2J\x1b[Hfull")
    assert screen.text() == "full"
    screen.feed(b"\x1b[?1049l" + b"y\r\n" * 60_000 + b"end")
    assert screen.text().split("\n")[-1] == "end"


def test_resize_and_reset() -> None:
    screen = drawn(b"hello\r\nworld")
    screen.resize(10, 40)
    assert cells(screen).shape == (10 * 40,)
    assert screen.text() == "hello\nworld"
    screen.reset()
    assert screen.text() == ""
