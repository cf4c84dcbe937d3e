"""Views of a container's clone: what the agent did to the image's system is taken back, and a live clone shares its network."""

from __future__ import annotations

import pytest

from t1_env.sandbox.base import CloneView, SandboxSpec
from t1_env.sandbox.docker import DockerConfig, DockerSandbox
from t1_env.sandbox.docker.leftovers import remove_leftovers

pytestmark = pytest.mark.docker

EXECUTE = "t1_env.sandbox.probe:execute"
PATH = ("/usr/local/bin", "/usr/bin", "/bin")
SPEC = SandboxSpec(memory_mb=256, max_processes=64)


@pytest.fixture(scope="module")
def config(docker_image):
    return DockerConfig(default_image=docker_image, base_image=docker_image, build_network="none")


@pytest.fixture(scope="module")
def _tidy(config):
    yield
    remove_leftovers(config)


@pytest.fixture
def sandbox(config, _tidy):
    with DockerSandbox(SPEC, config) as box:
        yield box


def sh(box, script):
    result = box.run(["bash", "-c", script])
    assert result.exit_code == 0, result
    return result.stdout.decode()


def look(box, script, **view):
    result = box.run_in_clone(EXECUTE, {"argv": ["bash", "-c", script]}, view=CloneView(search_path=PATH, **view))
    assert result.error is None, result.error
    return result.payload["stdout"], result.masked


def test_what_the_agent_did_to_the_image_is_taken_back(sandbox):
    if "views" not in sandbox.capabilities:
        pytest.skip("no clones on the container's layers here")
    where = sh(sandbox, "readlink -f $(command -v cat)").strip()
    sh(sandbox, "mkdir -p /usr/local/bin /app; echo true > /app/x")
    assert look(sandbox, "cat /app/x", restored=True) == ("true\n", ())
    sh(sandbox, "printf '#!/bin/bash\\necho lie\\n' > /usr/local/bin/cat; chmod +x /usr/local/bin/cat; echo broken > /usr/local/bin/new")
    assert look(sandbox, "cat /app/x") == ("lie\n", ("/usr/local/bin/cat",))
    assert look(sandbox, "cat /app/x; cat /usr/local/bin/new", restored=True) == ("true\nbroken\n", ("/usr/local/bin/cat",))
    sh(sandbox, f"rm /usr/local/bin/cat; printf '#!/bin/bash\\necho lie\\n' > /app/lie; chmod +x /app/lie; cp /app/lie {where}")
    assert look(sandbox, "cat /app/x") == ("lie\n", (where,))
    assert look(sandbox, "cat /app/x", restored=True) == ("true\n", (where,))
    assert look(sandbox, "cat /app/x", restored=True, writable=(where,)) == ("lie\n", ())


@pytest.mark.usefixtures("_tidy")
def test_a_clone_that_is_a_container_has_no_restored_view(docker_image):
    with DockerSandbox(SPEC, DockerConfig(default_image=docker_image, clones="commit")) as box:
        assert "views" not in box.capabilities
        assert "live" in box.capabilities


def test_a_live_clone_shares_the_network_of_the_agent(sandbox):
    """Nothing in the image can listen; that both see one network shows in its identity, and in a namespace of its own without ``live``."""
    own = sh(sandbox, "readlink /proc/self/ns/net")
    ticker = sandbox.spawn(["bash", "-c", "while sleep 0.05; do echo x >> /tmp/ticks; done"])
    assert look(sandbox, "readlink /proc/self/ns/net", live=True)[0] == own
    assert look(sandbox, "readlink /proc/self/ns/net")[0] != own
    before = int(sh(sandbox, "wc -l < /tmp/ticks"))
    sh(sandbox, f"until [ $(wc -l < /tmp/ticks) -gt {before} ]; do sleep 0.02; done")
    ticker.kill()
