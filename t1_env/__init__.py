"""T1 environment (registration and public names are added by env.py's owner)."""

from t1_env._version import __version__

__all__ = ["__version__"]
