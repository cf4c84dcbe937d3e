"""Importing and asking for help stay light."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "docker", "paramiko", "transformers", "stable_baselines3", "matplotlib", "asyncssh")


def loaded_after(code: str) -> set[str]:
    program = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_import_registers_and_loads_no_backend() -> None:
    loaded = loaded_after("import t1_env, gymnasium; assert 'T1Terminal-v0' in gymnasium.registry")
    assert not loaded & set(HEAVY)
    assert not {
        name for name in loaded if name.startswith(("t1_env.sandbox", "t1_env.shell", "t1_env.tasks", "t1_env.verifiers", "t1_agent"))
    }
    assert "pydantic" not in loaded


def test_the_whole_environment_loads_no_heavy_package() -> None:
    loaded = loaded_after("import t1_env.env, t1_env.vector, t1_env.wrappers, t1_env.cli.episodes, t1_env.integrations.sb3")
    assert not loaded & set(HEAVY)


def test_help_loads_neither_the_environment_nor_a_backend() -> None:
    loaded = loaded_after("from t1_env.cli.main import main; assert main(['--help']) == 0")
    assert not loaded & {*HEAVY, "t1_env.env", "t1_env.tasks", "t1_env.sandbox", "pydantic", "rich"}


def test_every_public_name_exists() -> None:
    import t1_env

    for name in t1_env.__all__:
        assert getattr(t1_env, name) is not None
    assert set(t1_env.__all__) <= set(dir(t1_env))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        t1_env.nothing  # noqa: B018


def test_importing_twice_registers_once() -> None:
    loaded_after("import warnings; warnings.simplefilter('error'); import importlib, t1_env; importlib.reload(t1_env)")
