"""The SSH sandbox: see ``docs/ssh.md``. paramiko is imported only when a server is reached."""

from t1_env.sandbox.ssh.config import SshConfig
from t1_env.sandbox.ssh.sandbox import SshSandbox, list_leftovers, remove_leftovers
from t1_env.sandbox.ssh.secret import Secret

__all__ = ["Secret", "SshConfig", "SshSandbox", "list_leftovers", "remove_leftovers"]
