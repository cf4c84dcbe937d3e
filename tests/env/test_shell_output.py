from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t1_env.shell.output import HeadTail, TextFilter

PIECES = [
    b"plain text", b"\n", b"\r\n", b"\r", b"\b", b"\t", b"\x07", b"\0", b"\xff", "é漢🙂".encode(), b"\x1b[31m", b"\x1b[0m", b"\x1b[K",
    b"\x1b[2K", b"\x1b[3D", b"\x1b[2C", b"\x1b[5G", b"\x1b]0;title\x07", b"\x1b]8;;http://x\x1b\\", b"\x1b(B", b"\x1b7", b"\x1b[?1049h",
    b"\x1b[?1049l",    b"\x1b[?25l", b"\x1b[", b"\x1b", b"12%", b" ", b"\x1bPq#1\x1b\\", b"\x1b[1P", b"\x1b[@", b"\x1b[2X",
]  # fmt: skip
streams = st.lists(st.sampled_from(PIECES), max_size=30).map(b"".join)


def convert(data: bytes, cuts: list[int] = [], **options: bool) -> str:  # noqa: B006 - never changed
    text = TextFilter(**options)
    ends = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    parts = [text.feed(data[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    return "".join(parts) + text.flush()


@settings(max_examples=300, deadline=None)
@given(streams, st.lists(st.integers(0, 200), max_size=6))
def test_where_reads_are_cut_does_not_matter(data: bytes, cuts: list[int]) -> None:
    assert convert(data, cuts) == convert(data)
    assert convert(data, cuts, keep_ansi=True) == convert(data, keep_ansi=True)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_become_printable_text(data: bytes) -> None:
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", convert(data))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", ""),
        (b"a\r\nb\r\n", "a\nb\n"),
        (b"a\r\r\nb", "a\nb"),
        (b"10%\r20%\r100%\n", "100%\n"),
        (b"long line\rab\n", "abng line\n"),
        (b"long line\r\x1b[Kab\n", "ab\n"),
        (b"abc\b\b\x1b[K\n", "a\n"),
        (b"abcdef\x1b[3D\x1b[1PX\n", "abcXf\n"),
        (b"\x1b[5Gx\n", "    x\n"),
        (b"a\x1b[3Cb\n", "a   b\n"),
        (b"main\n\x1b[?1049hfull screen\nof things\x1b[?1049lback\n", "main\nback\n"),
        (b"\x1b[?1049hnever closed", ""),
        (b"unfinished \x1b[3", "unfinished "),
        (b"\xe2\x82", "\ufffd"),
        (b"\x1b]0;no end of title", ""),
        (b"\x1b[38;2;1;2;3mcolour\x1b[m \x1b[4:3mwavy\n", "colour wavy\n"),
    ],
)
def test_what_the_eye_sees(data: bytes, text: str) -> None:
    assert convert(data) == text


def test_a_line_without_end_is_passed_on_in_bounded_pieces() -> None:
    text = TextFilter()
    out = "".join(text.feed(b"x" * 1000) for _ in range(100))
    assert len(out) > 90_000
    assert out + text.flush() == "x" * 100_000


def test_a_progress_bar_without_end_stays_small() -> None:
    text = TextFilter()
    assert "".join(text.feed(f"\r{i} of 20000".encode()) for i in range(20_001)) == ""
    assert text.flush() == "20000 of 20000"


def test_unfinished_sequences_reach_into_the_next_step() -> None:
    text = TextFilter()
    assert text.feed(b"a\xe2\x82") + text.flush(final=False) == "a"
    assert text.feed(b"\xac\x1b[3") + text.flush(final=False) == "€"
    assert text.feed(b"1mred\x1b[0m") + text.flush() == "red"


def test_modes_that_matter_are_followed() -> None:
    text = TextFilter()
    text.feed(b"\x1b[?1h\x1b=")
    assert text.application_cursor
    text.feed(b"\x1b[?1l\x1b[?47h")
    assert not text.application_cursor
    assert text.alternate
    text.feed(b"\x1b[?47")
    text.feed(b"l")
    assert not text.alternate


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text(alphabet="aé漢🙂\n", max_size=40), max_size=20), st.integers(64, 200))
def test_head_tail_counts_exactly(parts: list[str], limit: int) -> None:
    kept = HeadTail(limit)
    for part in parts:
        kept.append(part)
    whole = "".join(parts)
    size = len(whole.encode())
    text, total, elided = kept.take()
    assert total == size
    if size <= limit:
        assert (text, elided) == (whole, 0)
        return
    head, tail = text.split(f"\n[... {elided} bytes elided ...]\n")
    assert whole.startswith(head)
    assert whole.endswith(tail)
    assert len(head.encode()) + len(tail.encode()) + elided == size
    assert limit - 6 <= size - elided <= limit


def test_head_tail_starts_afresh_and_stays_bounded() -> None:
    kept = HeadTail(1000)
    for _ in range(1000):
        kept.append("y" * 10_000)
    text, total, elided = kept.take()
    assert (total, elided) == (10_000_000, 10_000_000 - 1000)
    assert len(text) < 1100
    assert kept.take() == ("", 0, 0)
