"""Frames: whatever way the bytes arrive, the messages are the same; what is no message ends the conversation."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t1_env.errors import (
    ConfigError,
    ImageBuildError,
    SandboxDied,
    SandboxError,
    SandboxUnavailable,
    ShellError,
    T1Error,
    TransportLost,
)
from t1_env.sandbox.base import ExecResult, SandboxSpec
from t1_env.sandbox.local import SandboxFileError
from t1_env.sandbox.outpost import frames, records
from t1_env.shell.config import ShellConfig

HEADERS = st.dictionaries(st.text(max_size=8), st.none() | st.integers() | st.text() | st.lists(st.integers(), max_size=3), max_size=4)


@given(st.lists(st.tuples(HEADERS, st.binary(max_size=300)), max_size=5), st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_frames_survive_any_cutting(messages: list[tuple[dict[str, object], bytes]], cuts: list[int]) -> None:
    data = frames.MAGIC + b"".join(frames.pack(header, blob) for header, blob in messages)
    reader, found, position, turn = frames.FrameReader(), [], 0, 0
    while position < len(data):
        size = cuts[turn % len(cuts)]
        found += reader.feed(data[position : position + size])
        position, turn = position + size, turn + 1
    assert found == messages


def test_what_a_login_script_prints_before_is_skipped_and_can_be_shown() -> None:
    reader = frames.FrameReader()
    assert reader.feed(b"Welcome to \0T1-outpost!\n") == []
    assert reader.preface == b"Welcome to \0T1-outpost!\n"
    assert reader.feed(frames.MAGIC + frames.pack({"a": 1})) == [({"a": 1}, b"")]
    assert reader.preface == b""


@pytest.mark.parametrize(
    "data",
    [
        b"x" * (frames.MAX_PREFACE_BYTES + 1),
        frames.MAGIC + struct.pack("!II", frames.MAX_HEADER_BYTES + 1, 0),
        frames.MAGIC + struct.pack("!II", 2, frames.MAX_BLOB_BYTES + 1),
        frames.MAGIC + struct.pack("!II", 3, 0) + b"{{{",
        frames.MAGIC + struct.pack("!II", 2, 0) + b"\xff\xfe",
        frames.MAGIC + struct.pack("!II", 4, 0) + b"[{}]",
        frames.MAGIC + struct.pack("!II", 1 << 20, 0) + b"[" * (1 << 20),
    ],
)
def test_what_is_no_message_is_a_lost_transport(data: bytes) -> None:
    with pytest.raises(TransportLost):
        frames.FrameReader().feed(data)


def test_a_message_over_the_limit_is_not_sent() -> None:
    with pytest.raises(ValueError, match="over the limit"):
        frames.pack({}, bytes(frames.MAX_BLOB_BYTES + 1))


@pytest.mark.parametrize("kind", [ConfigError, ImageBuildError, SandboxDied, SandboxError, SandboxUnavailable, ShellError])
def test_errors_keep_their_class_and_message(kind: type[T1Error]) -> None:
    again = records.error_from_json(json.loads(json.dumps(records.error_to_json(kind("what and why")))))
    assert type(again) is kind
    assert str(again) == "what and why"


def test_other_errors_become_the_nearest_class() -> None:
    class Odd(ImageBuildError):
        pass

    assert type(records.error_from_json(records.error_to_json(Odd("x")))) is ImageBuildError
    bug = records.error_from_json(records.error_to_json(ZeroDivisionError("division by zero")))
    assert type(bug) is SandboxError
    assert "ZeroDivisionError" in str(bug)
    # The loss of a far side's own connection is not the loss of ours.
    assert type(records.error_from_json(records.error_to_json(TransportLost("x")))) is SandboxError
    file = records.error_from_json(records.error_to_json(SandboxFileError(2, "put: No such file", "/a")))
    assert isinstance(file, SandboxFileError)
    assert (file.errno, file.strerror, file.filename) == (2, "put: No such file", "/a")


def test_records_survive_the_way() -> None:
    spec = SandboxSpec(workdir="/w", env={"A": "ü\udcff"}, memory_mb=None, cpus=0.5)
    assert records.spec_from_json(json.loads(json.dumps(records.spec_to_json(spec)))) == spec
    config = ShellConfig(rows=3, env={"X": "1"}, cwd="/tmp")
    assert records.shell_config_from_json(json.loads(json.dumps(records.shell_config_to_json(config)))) == config
    result = ExecResult(None, b"\0out", b"\xfferr", timed_out=True)
    header, blob = records.exec_result_to_frame(result)
    assert records.exec_result_from_frame(json.loads(json.dumps(header)), blob) == result
