"""The first file that runs at the far side: makes T1's modules importable there and starts the outpost.

It lies at the top of a runtime (see runtime.py), beside ``site-packages``. The package ``t1_env`` itself is a stand-in, so that
``t1_env/__init__`` (gymnasium, numpy) never runs at the far side.
"""

import importlib.machinery
import os
import sys
import types


def _boot() -> None:
    root = os.path.dirname(os.path.abspath(__file__))
    packages = os.path.join(root, "site-packages")
    sys.path.insert(0, packages)
    package = types.ModuleType("t1_env")
    package.__path__ = [os.path.join(packages, "t1_env")]
    package.__spec__ = importlib.machinery.ModuleSpec("t1_env", None, is_package=True)
    package.__spec__.submodule_search_locations = package.__path__
    sys.modules["t1_env"] = package
    if sys.argv[1:] == ["call"]:  # not a server: one trusted function, in a container made for it
        from t1_env.sandbox.outpost.call import main as call

        call()
    from t1_env.sandbox.outpost.server import main

    main(sys.argv[1:], root)


if __name__ == "__main__":
    _boot()
