"""Building a task's Dockerfile by a Docker daemon: its classic builder first, BuildKit for what only that understands."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from t1_env.errors import ImageBuildError, SandboxError, TransportLost
from t1_env.sandbox.docker.daemon import KIND_LABEL, Daemon, DeadlineExpired
from t1_env.sandbox.owner import directory_prefix

DIGEST_LABEL: Final = "t1.digest"
REPOSITORY: Final = "t1-task"

_LOG_KEPT_CHARACTERS: Final = 1 << 16
_LOG_SHOWN_CHARACTERS: Final = 2000
_STEP: Final = re.compile(r"Step (?P<number>\d+)/\d+ : ")
_BUILDKIT_STEP: Final = re.compile(r"\[[^\]]*\d+/\d+\] (?P<text>.*)", re.DOTALL)
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
_NOT_PULLED: Final = re.compile(
    r"no such host|dial tcp|pull access denied|manifest (for .* )?(not found|unknown)|repository does not exist|failed to resolve"
)
_NOT_PULLED_ADVICE: Final = (
    "; an image that FROM names is not on the Docker daemon and cannot be pulled: load it (docker load -i FILE), or name one that is there"
    " in its place with the variable T1_DOCKER_BASE_IMAGE or DockerConfig(base_image=...)"
)
_PARSE_ERROR: Final = re.compile(r"parse error (?:on )?line (?P<line>\d+)")
_ESCAPE: Final = re.compile(r"#\s*escape\s*=\s*(?P<character>[\\`])\s*", re.IGNORECASE)
_FROM: Final = re.compile(r"(?P<before>\s*FROM\s+(?:--\S+\s+)*)(?P<image>\S+)(?P<after>(?:\s+AS\s+(?P<stage>\S+))?\s*)", re.IGNORECASE)
_NEEDS_BUILDKIT: Final = re.compile(r"requires? BuildKit|unknown flag|unknown instruction", re.IGNORECASE)
_BUILDKIT_WORDS: Final = re.compile(r"<<-?\s*['\"]?\w|^\s*(?:RUN|COPY|ADD|FROM)\s+--", re.IGNORECASE | re.MULTILINE)


class Build:
    """One build of one directory.

    Args:
        daemon: Who builds.
        directory: The context, with a ``Dockerfile``.
        instead: Image that stands in for those that ``FROM`` names; empty if they mean what they say.
        timeout_s: Limit of the whole build.

    Raises:
        ImageBuildError: The Dockerfile cannot be read.
    """

    def __init__(self, daemon: Daemon, directory: Path, instead: str, timeout_s: float) -> None:
        self._daemon = daemon
        self._directory = directory
        self._path = directory / "Dockerfile"
        try:
            self._text = self._path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ImageBuildError(f"{self._path}: cannot be read: {error}") from error
        self._dockerfile = replace_bases(self._text, instead) if instead else self._text
        self._digest = content_digest(directory, instead, daemon.config.build_network or "")
        self._timeout_s = timeout_s
        self._log = ""
        self._line: int | None = None

    @property
    def name(self) -> str:
        """Name of the image, made of the content of the directory."""
        return f"{REPOSITORY}:{self._digest[:24]}"

    def run(self) -> str:
        """Build it.

        Returns:
            The image's name.

        Raises:
            ImageBuildError: A step failed, or the time ran out; names the line.
            TransportLost: The daemon does not answer.
        """
        try:
            self._follow(self._classic)
        except ImageBuildError as error:
            if not (_NEEDS_BUILDKIT.search(str(error)) and _BUILDKIT_WORDS.search(self._text)):
                raise
            self._log, self._line = "", None
            self._follow(self._buildkit)
        return self.name

    # -------------------------------------------------------------------------------------------------------------------- requests
    def _follow(self, request: Any) -> None:
        try:
            for message in self._daemon.messages(f"build {self._path}", self._timeout_s, request):
                self._read(message)
        except DeadlineExpired as error:
            raise self._error(f"the build ran out of time ({self._timeout_s:g} s)") from error
        except (TransportLost, ImageBuildError):
            raise
        except SandboxError as error:
            raise self._error(str(error)) from error

    def _labels(self) -> dict[str, str]:
        return {**self._daemon.config.labels, KIND_LABEL: "task-image", DIGEST_LABEL: self._digest}

    def _classic(self, api: Any) -> Iterator[dict[str, Any]]:
        with tempfile.TemporaryDirectory(prefix=directory_prefix("build")) as elsewhere:
            dockerfile = Path(elsewhere, "Dockerfile")
            dockerfile.write_text(self._dockerfile, encoding="utf-8")
            yield from api.build(
                path=str(self._directory),
                dockerfile=str(dockerfile),
                tag=self.name,
                labels=self._labels(),
                network_mode=self._daemon.config.build_network,
                rm=True,
                forcerm=True,
                timeout=self._timeout_s,
                decode=True,
            )

    def _buildkit(self, api: Any) -> Iterator[dict[str, Any]]:
        """The same request with the builder's version 2. The SDK does not know it; it needs no session for a context that is sent whole."""
        parameters = {"version": "2", "t": self.name, "rm": "1", "dockerfile": "Dockerfile", "labels": json.dumps(self._labels())}
        if self._daemon.config.build_network is not None:
            parameters["networkmode"] = self._daemon.config.build_network
        response = api.post(
            f"{api.base_url}/v{api.api_version}/build",
            params=parameters,
            data=self._context().getvalue(),
            headers={"Content-Type": "application/x-tar"},
            stream=True,
            timeout=self._timeout_s,
        )
        if response.status_code != 200:
            raise self._error(response.text.strip())
        for line in response.iter_lines():
            yield json.loads(line)

    def _context(self) -> io.BytesIO:
        ignored = self._directory / ".dockerignore"
        lines = ignored.read_text(encoding="utf-8").splitlines() if ignored.is_file() else []
        patterns = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        context = self._daemon.sdk.utils.build.tar(
            str(self._directory), exclude=[*patterns, "!Dockerfile"], dockerfile=("Dockerfile", self._dockerfile), gzip=True
        )
        return io.BytesIO(context.read())

    # -------------------------------------------------------------------------------------------------------------------- messages
    def _read(self, message: Mapping[str, Any]) -> None:
        text = str(message.get("stream", ""))
        if step := _STEP.match(text):
            self._line = line_of_step(self._text, int(step["number"]))
        if message.get("id") == "moby.buildkit.trace":
            text = self._read_trace(str(message.get("aux", "")))
        self._log = (self._log + text)[-_LOG_KEPT_CHARACTERS:]
        if "error" in message:
            raise self._error(str(message["error"]))

    def _read_trace(self, encoded: str) -> str:
        """What a message of BuildKit's says: names of steps that begin or fail, and what commands print."""
        said = []
        try:
            for number, value in protobuf_fields(base64.b64decode(encoded)):
                parts = dict(protobuf_fields(value)) if isinstance(value, bytes) else {}
                if number == 1:  # vertex: 3 is its name, 5 when it began, 6 when it ended, 7 its error
                    name = _text(parts.get(3))
                    if 7 in parts and (step := _BUILDKIT_STEP.fullmatch(name)):
                        self._line = line_of_instruction(self._text, step["text"])
                    if 5 in parts and 6 not in parts:
                        said.append(f"{name}\n")
                elif number == 3:  # log: 4 is the text
                    said.append(_text(parts.get(4)))
        except (ValueError, IndexError, binascii.Error):  # a later daemon's message; the build does not depend on it
            return ""
        return "".join(said)

    def _error(self, reason: str) -> ImageBuildError:
        parse_error = _PARSE_ERROR.search(reason)
        line = int(parse_error["line"]) if parse_error else self._line
        where = f"{self._path}:{line}" if line else str(self._path)
        output = _COLOUR.sub("", self._log)[-_LOG_SHOWN_CHARACTERS:].strip()
        advice = _NOT_PULLED_ADVICE if _NOT_PULLED.search(reason) else ""
        return ImageBuildError(f"{where}: {reason.strip()}{advice}" + (f"\nend of the build's output:\n{output}" if output else ""))


def content_digest(directory: Path, *extra: str) -> str:
    """SHA-256 (hex) of everything in a build context: names, kinds, modes and contents, not owners or times.

    Args:
        directory: The context.
        extra: More that the result depends on.
    """
    digest = hashlib.sha256(json.dumps(extra).encode())
    for folder, folders, names in os.walk(directory):
        folders.sort()
        for name in sorted([*names, *folders]):
            path = Path(folder, name)
            status = path.lstat()
            digest.update(f"{path.relative_to(directory)}\0{status.st_mode:o}\0".encode("utf-8", "surrogateescape"))
            if stat.S_ISLNK(status.st_mode):
                digest.update(os.fsencode(path.readlink()))
            elif stat.S_ISREG(status.st_mode):
                with path.open("rb") as stream:
                    digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def line_of_step(dockerfile: str, step: int) -> int | None:
    """Line on which the ``step``-th instruction of a Dockerfile begins, from 1; None if there is no such instruction."""
    return next((line for count, (line, _) in enumerate(_instructions(dockerfile), 1) if count == step), None)


def line_of_instruction(dockerfile: str, text: str) -> int | None:
    """Line on which the instruction that reads like ``text`` begins, from 1; None if there is no such instruction."""
    wanted = text.split()
    return next((line for line, found in _instructions(dockerfile) if wanted and found.split()[: len(wanted)] == wanted), None)


def replace_bases(dockerfile: str, image: str) -> str:
    """Return a Dockerfile in which every ``FROM`` that names an image, not an earlier stage, names ``image``."""
    stages = {"scratch"}
    lines = []
    for line in dockerfile.splitlines():
        found = _FROM.fullmatch(line)
        if found:
            if found["image"].lower() not in stages:
                line = f"{found['before']}{image}{found['after']}"
            if found["stage"]:
                stages.add(found["stage"].lower())
        lines.append(line)
    return "\n".join(lines) + "\n"


def protobuf_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of an encoded protocol buffer.

    Raises:
        ValueError: A kind of field that is not in use any more.
        IndexError: The message is cut off.
    """
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        match key & 7:
            case 0:
                value, position = _varint(data, position)
                yield key >> 3, value
            case 2:
                size, position = _varint(data, position)
                yield key >> 3, data[position : position + size]
                position += size
            case 1 | 5 as kind:
                size = 8 if kind == 1 else 4
                yield key >> 3, data[position : position + size]
                position += size
            case kind:
                raise ValueError(f"unknown kind of field {kind}")


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7


def _text(value: int | bytes | None) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else ""


def _instructions(dockerfile: str) -> Iterator[tuple[int, str]]:
    """First line and text of each instruction, continuation lines joined."""
    lines = dockerfile.splitlines()
    directive = _ESCAPE.fullmatch(lines[0].strip()) if lines else None
    escape = directive["character"] if directive else "\\"
    begin, parts = 0, list[str]()
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue  # also between the lines of one instruction
        if not parts:
            begin = number
        parts.append(text.removesuffix(escape))
        if not text.endswith(escape):
            yield begin, "".join(parts)
            parts = []
    if parts:
        yield begin, "".join(parts)
