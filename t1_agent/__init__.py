"""T1 trainer: a Mixture-of-Experts actor-critic for long-horizon terminal tasks. Importing this package loads no torch."""

from t1_env._version import __version__

__all__ = ["__version__"]
