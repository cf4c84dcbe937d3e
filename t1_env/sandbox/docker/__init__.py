"""The Docker sandbox: see ``docs/docker.md``. The docker package is imported only when a daemon is asked."""

from t1_env.sandbox.docker.config import DockerConfig
from t1_env.sandbox.docker.sandbox import DockerSandbox

__all__ = ["DockerConfig", "DockerSandbox"]
