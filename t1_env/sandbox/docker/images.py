"""The image that a Docker sandbox starts from: found, pulled, or built by the daemon from a task's Dockerfile."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from t1_env.errors import ImageBuildError, SandboxError, SandboxUnavailable, TransportLost
from t1_env.sandbox import files
from t1_env.sandbox.base import ImageSource
from t1_env.sandbox.docker.build import Build
from t1_env.sandbox.docker.config import IMAGE_VARIABLE
from t1_env.sandbox.docker.daemon import Daemon


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
            name = Build(daemon, directory, instead, timeout_s).run()
            image = _inspect(daemon, name)
            if image is None:
                raise ImageBuildError(f"{dockerfile}: the image was built, but somebody removed it at once")
            _images[state] = image.id
    return image
