"""The image that a Docker sandbox starts from: found, pulled, or built by the daemon from a task's Dockerfile."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from t1_env.errors import ImageBuildError, SandboxError, SandboxUnavailable, TransportLost
from t1_env.sandbox import files
from t1_env.sandbox.base import ImageSource
from t1_env.sandbox.docker_config import IMAGE_VARIABLE
from t1_env.sandbox.docker_daemon import KIND_LABEL, Daemon, DeadlineExpired

DIGEST_LABEL: Final = "t1.digest"
REPOSITORY: Final = "t1-task"

_LOG_KEPT_CHARACTERS: Final = 1 << 16
_LOG_SHOWN_CHARACTERS: Final = 2000
_STEP: Final = re.compile(r"Step (?P<number>\d+)/\d+ : (?P<text>.*)")
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
_PARSE_ERROR: Final = re.compile(r"parse error (?:on )?line (?P<line>\d+)")
_ESCAPE: Final = re.compile(r"#\s*escape\s*=\s*(?P<character>[\\`])\s*", re.IGNORECASE)
_FROM: Final = re.compile(r"(?P<before>\s*FROM\s+(?:--\S+\s+)*)(?P<image>\S+)(?P<after>(?:\s+AS\s+(?P<stage>\S+))?\s*)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Image:
    """An image that the daemon has.

    Args:
        id: Its identity there.
        env: Variables of its ``ENV`` instructions.
        workdir: Its last ``WORKDIR``, or None.
        user: Its ``USER``, empty for root.
        volumes: Its ``VOLUME`` paths.
    """

    id: str
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    user: str = ""
    volumes: tuple[str, ...] = ()


def find_image(daemon: Daemon, source: ImageSource | None) -> Image:
    """Return the image that a specification asks for; it is pulled or built if need be.

    Args:
        daemon: Where.
        source: What is asked for; None for the configured default image.

    Raises:
        ImageBuildError: It cannot be built or pulled; names the Dockerfile line.
        SandboxUnavailable: No source is given, and there is no default image.
        TransportLost: The daemon does not answer.
    """
    if source is not None and source.docker_image is not None:
        return _named(daemon, source.docker_image, source.build_timeout_s)
    if source is not None and source.environment_dir is not None:
        return _built(daemon, source.environment_dir.resolve(), source.build_timeout_s)
    name = daemon.config.image_without_source()
    if name is None:
        raise SandboxUnavailable(
            "the Docker sandbox was given no image: set SandboxSpec.image, DockerConfig.default_image or the variable "
            f"{IMAGE_VARIABLE} to the name of an image with bash in it"
        )
    try:
        return _named(daemon, name, ImageSource().build_timeout_s)
    except ImageBuildError as error:
        raise SandboxUnavailable(f"the default image cannot be used: {error}") from error


# --------------------------------------------------------------------------------------------------------------------------- by name
def _named(daemon: Daemon, name: str, timeout_s: float) -> Image:
    image = _inspect(daemon, name)
    if image is not None:
        return image
    if daemon.config.pull == "never":
        raise ImageBuildError(f"image {name!r} is not on the Docker daemon, and DockerConfig.pull is 'never'; load it: docker load -i FILE")
    problem = ""
    try:
        for message in daemon.messages(f"pull image {name!r}", timeout_s, lambda api: _pull(api, name)):
            problem = str(message.get("error", problem))
    except TransportLost:
        raise
    except SandboxError as error:
        problem = str(error)
    image = _inspect(daemon, name)
    if image is None:
        advice = "load it (docker load -i FILE), or correct the name"
        raise ImageBuildError(f"image {name!r} is not on the Docker daemon and cannot be pulled: {problem or 'no reason given'}; {advice}")
    return image


def _pull(api: Any, name: str) -> Iterator[dict[str, Any]]:
    stream: Iterator[dict[str, Any]] = api.pull(name, stream=True, decode=True)
    return stream


def _inspect(daemon: Daemon, name: str) -> Image | None:
    with daemon.doing(f"look at image {name!r}"):
        try:
            found = daemon.api.inspect_image(name)
        except daemon.sdk.errors.NotFound:
            return None
        except daemon.sdk.errors.APIError as error:
            if error.status_code != 400:
                raise
            raise ImageBuildError(f"{name!r} cannot be the name of an image: {error.explanation}") from error
    config = found.get("Config") or {}
    pairs = (entry.partition("=") for entry in config.get("Env") or ())
    return Image(
        id=str(found["Id"]),
        env={key: value for key, _, value in pairs},
        workdir=config.get("WorkingDir") or None,
        user=config.get("User") or "",
        volumes=tuple(sorted(config.get("Volumes") or ())),
    )


# --------------------------------------------------------------------------------------------------------------------------- building
_images: dict[tuple[str, ...], str] = {}
_locks: dict[tuple[str, ...], threading.Lock] = {}
_guard: Final = threading.Lock()


def _built(daemon: Daemon, directory: Path, timeout_s: float) -> Image:
    """Build once in this process for each state of a directory; the daemon's own cache makes it quick for the next process.

    The daemon is asked once even where an image of this content exists: only it knows whether the image behind ``FROM`` has changed.
    """
    dockerfile = directory / "Dockerfile"
    if not dockerfile.is_file():
        raise ImageBuildError(f"{dockerfile}: not found; a task needs a Dockerfile in its environment directory, or a docker_image")
    instead = daemon.config.image_instead_of_from() or ""
    key = (daemon.identity, str(directory), instead, daemon.config.build_network or "")
    with _guard:
        lock = _locks.setdefault(key, threading.Lock())
    with lock:
        state = (*key, files.fingerprint([str(directory)]))
        known = _images.get(state)
        image = _inspect(daemon, known) if known is not None else None
        if image is None:
            name = _Build(daemon, directory, instead, timeout_s).run()
            image = _inspect(daemon, name)
            if image is None:
                raise ImageBuildError(f"{dockerfile}: the image was built, but somebody removed it at once")
            _images[state] = image.id
    return image


class _Build:
    """One build by the daemon."""

    def __init__(self, daemon: Daemon, directory: Path, instead: str, timeout_s: float) -> None:
        self._daemon = daemon
        self._directory = directory
        self._path = directory / "Dockerfile"
        try:
            self._text = self._path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ImageBuildError(f"{self._path}: cannot be read: {error}") from error
        self._instead = instead
        self._timeout_s = timeout_s
        self._log = ""
        self._step = 0

    def run(self) -> str:
        """Returns the image's identity."""
        digest = content_digest(self._directory, self._instead, self._daemon.config.build_network or "")
        with tempfile.TemporaryDirectory(prefix="t1-build-") as elsewhere:
            dockerfile = self._path
            if self._instead:
                dockerfile = Path(elsewhere, "Dockerfile")
                dockerfile.write_text(replace_bases(self._text, self._instead), encoding="utf-8")
            try:
                for message in self._daemon.messages(
                    f"build {self._path}", self._timeout_s, lambda api: self._request(api, dockerfile, digest)
                ):
                    self._read(message)
            except DeadlineExpired as error:
                raise self._error(f"the build ran out of time ({self._timeout_s:g} s)") from error
            except (TransportLost, ImageBuildError):
                raise
            except SandboxError as error:
                raise self._error(str(error)) from error
        return f"{REPOSITORY}:{digest[:24]}"

    def _request(self, api: Any, dockerfile: Path, digest: str) -> Iterator[dict[str, Any]]:
        stream: Iterator[dict[str, Any]] = api.build(
            path=str(self._directory),
            dockerfile=str(dockerfile),
            tag=f"{REPOSITORY}:{digest[:24]}",
            labels={**self._daemon.config.labels, KIND_LABEL: "task-image", DIGEST_LABEL: digest},
            network_mode=self._daemon.config.build_network,
            rm=True,
            forcerm=True,
            use_config_proxy=True,
            timeout=self._timeout_s,
            decode=True,
        )
        return stream

    def _read(self, message: Mapping[str, Any]) -> None:
        text = str(message.get("stream", ""))
        if step := _STEP.match(text):
            self._step = int(step["number"])
        self._log = (self._log + text)[-_LOG_KEPT_CHARACTERS:]
        if "error" in message:
            raise self._error(str(message["error"]))

    def _error(self, reason: str) -> ImageBuildError:
        parse_error = _PARSE_ERROR.search(reason)
        line = int(parse_error["line"]) if parse_error else line_of_step(self._text, self._step)
        where = f"{self._path}:{line}" if line else str(self._path)
        hint = "; build it with 'docker build' and name it as the task's docker_image" if "requires BuildKit" in reason else ""
        output = _COLOUR.sub("", self._log)[-_LOG_SHOWN_CHARACTERS:].strip()
        return ImageBuildError(f"{where}: {reason.strip()}{hint}" + (f"\nend of the build's output:\n{output}" if output else ""))


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
    lines = dockerfile.splitlines()
    directive = _ESCAPE.fullmatch(lines[0].strip()) if lines else None
    escape = directive["character"] if directive else "\\"
    count, continued = 0, False
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue  # also between the lines of one instruction
        if not continued:
            count += 1
            if count == step:
                return number
        continued = text.endswith(escape)
    return None


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
