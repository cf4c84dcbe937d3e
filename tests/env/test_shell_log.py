"""The log of everything a terminal printed."""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from t1_env.errors import ShellError
from t1_env.shell.log import OutputLog


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.binary(max_size=40), max_size=30), st.integers(1, 50), st.data())
def test_it_is_the_tail_of_what_was_written(parts: list[bytes], capacity: int, data: st.DataObject) -> None:
    log, whole = OutputLog(capacity), b""
    for part in parts:
        log.append(part)
        whole += part
        assert log.size == len(whole)
        assert log.start == max(0, len(whole) - capacity)
        offset = data.draw(st.integers(log.start, log.size + 5))
        size = data.draw(st.integers(0, 60))
        assert log.read(offset, size) == whole[offset : offset + size]
    if log.start:
        with pytest.raises(ShellError, match="not kept any more"):
            log.read(log.start - 1, 1)
    log.close()


def test_without_capacity_it_only_counts() -> None:
    log = OutputLog(0)
    log.append(b"12345")
    assert (log.start, log.size, log.read(5, 10)) == (5, 5, b"")
    with pytest.raises(ShellError, match="log_bytes is 0"):
        log.read(4, 1)


@pytest.mark.parametrize(("offset", "size"), [(-1, 1), (0, -1)])
def test_bad_parts(offset: int, size: int) -> None:
    with pytest.raises(ShellError, match=">= 0"):
        OutputLog(10).read(offset, size)


def test_the_file_has_no_name_and_goes_with_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = len(list(Path("/proc/self/fd").iterdir()))
    log = OutputLog(100)
    log.append(b"x" * 1000)
    assert list(tmp_path.iterdir()) == []
    log.close()
    log.close()
    other = OutputLog(100)
    other.append(b"y")
    del other
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_filesystem_without_nameless_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    real = os.open

    def refuse(path: str, flags: int, *rest: int, **options: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)
    log = OutputLog(100)
    log.append(b"data")
    assert log.read(0, 10) == b"data"
    assert list(tmp_path.iterdir()) == []
    log.close()


def test_a_full_disk_costs_the_past_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    log = OutputLog(100)
    log.append(b"before")
    real = os.pwrite

    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    log.append(b"lost")
    assert (log.start, log.size) == (10, 10)
    with pytest.raises(ShellError, match="No space left"):
        log.read(0, 10)
    monkeypatch.setattr(os, "pwrite", real)
    log.append(b"after")
    assert log.read(10, 10) == b"after"
    log.close()


def test_no_disk_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    log = OutputLog(100)
    log.append(b"lost")
    assert (log.start, log.size) == (4, 4)
