"""How Docker sandboxes are made on one daemon; nothing here imports the docker SDK."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from t1_env.errors import ConfigError

IMAGE_VARIABLE: Final = "T1_DOCKER_IMAGE"
BASE_IMAGE_VARIABLE: Final = "T1_DOCKER_BASE_IMAGE"


@dataclass(frozen=True, slots=True)
class DockerConfig:
    """Settings of the Docker sandbox that are not a task's business.

    Args:
        base_url: Where the daemon listens (``unix:///run/user/1000/docker.sock``, ``tcp://host:2376``, ``ssh://user@host``); None takes
            ``DOCKER_HOST``, ``DOCKER_TLS_VERIFY`` and ``DOCKER_CERT_PATH``, else the machine's own socket.
        default_image: Image of a sandbox whose specification names no source; None takes the variable ``T1_DOCKER_IMAGE``.
        base_image: Stands in for every image that a ``FROM`` names, for machines that reach no registry; None takes the variable
            ``T1_DOCKER_BASE_IMAGE``, and without that a ``FROM`` means what it says.
        pull: ``"missing"`` fetches an image that the daemon does not have, ``"never"`` makes that an error.
        network_mode: Docker network of a sandbox whose task asks for one; all others have none.
        build_network: Docker network of ``RUN`` instructions; None is the daemon's default.
        clones: How verification clones a container. ``"auto"``: on the container's own layers where this process is root on the daemon's
            machine (about a tenth of a second), else by a commit (about a second); ``"commit"``: always so.
        runtime: OCI runtime, for example ``"runsc"``; None is the daemon's default.
        max_concurrent_starts: How many containers of this process may be created, started or committed at a time.
        start_interval_s: Least time between two such starts, in seconds.
        request_timeout_s: Limit of one request to the daemon (builds and pulls have the task's own), in seconds.
        labels: More labels for everything that is made.

    Raises:
        ConfigError: A value is outside its range.
    """

    base_url: str | None = None
    default_image: str | None = None
    base_image: str | None = None
    pull: Literal["missing", "never"] = "missing"
    network_mode: str = "bridge"
    build_network: str | None = None
    clones: Literal["auto", "commit"] = "auto"
    runtime: str | None = None
    max_concurrent_starts: int = 4
    start_interval_s: float = 0.02
    request_timeout_s: float = 120.0
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.pull not in ("missing", "never"):
            raise ConfigError(f"DockerConfig.pull must be 'missing' or 'never', got {self.pull!r}")
        if self.clones not in ("auto", "commit"):
            raise ConfigError(f"DockerConfig.clones must be 'auto' or 'commit', got {self.clones!r}")
        if self.max_concurrent_starts < 1:
            raise ConfigError(f"DockerConfig.max_concurrent_starts must be at least 1, got {self.max_concurrent_starts!r}")
        for name, value, least in (("start_interval_s", self.start_interval_s, 0.0), ("request_timeout_s", self.request_timeout_s, 1.0)):
            if not (math.isfinite(value) and value >= least):
                raise ConfigError(f"DockerConfig.{name} must be a number of seconds from {least:g}, got {value!r}")
        ours = sorted(name for name in self.labels if name.startswith("t1."))
        if ours:
            raise ConfigError(f"DockerConfig.labels: {', '.join(ours)}: labels that begin with 't1.' are set by T1 itself")

    def image_without_source(self) -> str | None:
        """Image of a sandbox whose specification names no source, None if nobody said."""
        return self.default_image or os.environ.get(IMAGE_VARIABLE) or None

    def image_instead_of_from(self) -> str | None:
        """Image that stands in for those that ``FROM`` names, None if they mean what they say."""
        return self.base_image or os.environ.get(BASE_IMAGE_VARIABLE) or None
