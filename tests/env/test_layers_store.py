"""The store of layers: shared by processes, never half-made, emptied without pulling anything from under a sandbox."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from t1_env.cli.main import main
from t1_env.errors import ConfigError, ImageBuildError, SandboxError
from t1_env.sandbox.base import ImageSource, SandboxSpec
from t1_env.sandbox.layers import LayerStore, chain_digest
from t1_env.sandbox.local import LocalSandbox, unavailable_reason


@pytest.fixture(autouse=True)
def _own_stores(stores):
    return stores


@pytest.fixture(scope="module")
def _namespaces():
    if reason := unavailable_reason():
        pytest.skip(reason)


def make(store: LayerStore, name: str, *, below=None, size: int = 10) -> str:
    """A layer without a sandbox."""
    digest = chain_digest("" if below is None else below, name)
    parent = None if below is None else store.acquire(below)
    with store.making(digest, time.monotonic() + 10) as private:
        Path(private, "root").mkdir()
        Path(private, "root", name).write_bytes(bytes(size))
        manifest = {"parts": ["root"], "marked": False, "entries": 1, "size_bytes": size, "account": None, "instruction": f"RUN {name}"}
        store.commit(private, digest, manifest, None if parent is None else parent[0])
    if parent is not None:
        os.close(parent[1])
    return digest


def names(store: LayerStore) -> set[str]:
    return {info.instruction.removeprefix("RUN ") for info in store.all()}


def used(store: LayerStore, digest: str, seconds_ago: float) -> None:
    then = time.time() - seconds_ago
    os.utime(store.lock_path(digest), (then, then))


# ------------------------------------------------------------------------------------------------------------------------- pruning
def test_least_recently_used_layers_go_first_and_never_before_what_stands_on_them():
    store = LayerStore()
    old = make(store, "old", size=100)
    base = make(store, "base", size=100)
    top = make(store, "top", below=base, size=100)
    for digest, age in ((base, 5000), (old, 3000), (top, 1000)):
        used(store, digest, age)
    assert store.prune(max_bytes=300).removed == 0
    pruned = store.prune(max_bytes=250)
    assert (pruned.removed, pruned.freed_bytes, pruned.kept_bytes, names(store)) == (1, 100, 200, {"base", "top"})
    used(store, top, 1000)
    store.prune(max_bytes=100)
    assert names(store) == {"base"}  # the one on top first
    store.prune(max_bytes=0)
    assert names(store) == set()


def test_the_number_of_layers_can_be_limited():
    store = LayerStore()
    for age, name in enumerate("abcd"):
        used(store, make(store, name, size=0), 100 - age)
    assert store.prune(max_layers=4).removed == 0
    assert store.prune(max_layers=1).removed == 3
    assert names(store) == {"d"}


def test_layers_that_nobody_used_for_long_go():
    store = LayerStore()
    old, new = make(store, "old"), make(store, "new")
    used(store, old, 3 * 86400)
    used(store, new, 86400)
    assert store.prune(unused_for_s=2 * 86400).removed == 1
    assert names(store) == {"new"}


def test_held_layers_and_what_is_below_them_stay():
    store = LayerStore()
    base = make(store, "base")
    middle = make(store, "middle", below=base)
    top = make(store, "top", below=middle)
    other = make(store, "other", below=base)
    _, fd = store.acquire(middle)
    try:
        pruned = LayerStore().prune()
        assert (pruned.removed, pruned.in_use, names(store)) == (2, 2, {"base", "middle"})
        assert store.acquire(top) is None
        assert store.acquire(other) is None
    finally:
        os.close(fd)
    assert store.prune().removed == 2
    assert not any(Path(store.lock_path("")).iterdir())


@pytest.mark.namespaces
@pytest.mark.usefixtures("_namespaces")
def test_layers_under_a_running_sandbox_stay_until_it_is_gone(tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM x\nRUN echo one > /one\nRUN echo two > /two\n")
    box = LocalSandbox(SandboxSpec(image=ImageSource(tmp_path)))
    box.start()
    fork = box.fork()
    store = LayerStore()
    assert (store.prune().removed, store.prune().in_use) == (0, 2)
    box.close()
    assert store.prune().removed == 0
    assert fork.run(["cat", "/one", "/two"]).stdout == b"one\ntwo\n"
    fork.close()
    assert store.prune().removed == 2
    with LocalSandbox(SandboxSpec(image=ImageSource(tmp_path))) as again:
        assert again.run(["cat", "/one", "/two"]).stdout == b"one\ntwo\n"


# ------------------------------------------------------------------------------------------------------------- processes at once
def test_only_one_process_makes_a_layer_and_the_wait_ends():
    store = LayerStore()
    with store.making("a" * 64, time.monotonic() + 10):
        assert store.acquire("a" * 64) is None
        with pytest.raises(ImageBuildError, match="another process"), store.making("a" * 64, time.monotonic() + 0.1):
            pytest.fail("two at once")
    with store.making("a" * 64, time.monotonic() + 10) as private:
        assert list(Path(private).iterdir()) == []


_BUILD = """
import pathlib, sys
from t1_env.sandbox.base import ImageSource, SandboxSpec
from t1_env.sandbox.local import LocalSandbox
with LocalSandbox(SandboxSpec(image=ImageSource(pathlib.Path(sys.argv[1])))) as box:
    print(box.run(["cat", "/stamp"]).stdout.decode(), flush=True)
"""


@pytest.mark.namespaces
@pytest.mark.usefixtures("_namespaces")
def test_processes_that_build_the_same_at_once_share_one_layer(tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM x\nRUN sleep 0.5; date +%N > /stamp\nRUN true\n")
    command = [sys.executable, "-c", _BUILD, str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    stamps = {process.communicate(timeout=200)[0] for process in processes}
    assert len(stamps) == 1
    assert len(stamps.pop().strip()) == 9
    assert len(LayerStore().all()) == 2


@pytest.mark.namespaces
@pytest.mark.usefixtures("_namespaces")
def test_a_process_that_is_killed_in_the_middle_leaves_nothing_in_the_way(tmp_path, stores):
    (tmp_path / "Dockerfile").write_text("FROM x\nRUN test -e /etc/profile && echo ok > /stamp && sleep $SLEEP\n".replace("$SLEEP", "1000"))
    process = subprocess.Popen([sys.executable, "-c", _BUILD, str(tmp_path)], stdout=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not list(stores.cache.glob("layers/.new-*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert LayerStore().all() == []
    assert list(stores.cache.glob("layers/.new-*"))
    LayerStore().prune()
    assert list(stores.cache.glob("layers/.*")) == []


@pytest.mark.namespaces
@pytest.mark.usefixtures("_namespaces")
def test_pruning_while_sandboxes_start_breaks_neither(tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM x\nRUN echo one > /one\nRUN echo two > /two\n")
    stop = threading.Event()

    def prune() -> None:
        while not stop.is_set():
            LayerStore().prune()
            time.sleep(0.01)

    thread = threading.Thread(target=prune)
    thread.start()
    try:
        for _ in range(10):
            with LocalSandbox(SandboxSpec(image=ImageSource(tmp_path))) as box:
                assert box.run(["cat", "/one", "/two"]).stdout == b"one\ntwo\n"
    finally:
        stop.set()
        thread.join()


def test_the_store_does_not_grow_for_ever(monkeypatch, stores):
    store = LayerStore()
    used(store, make(store, "old", size=2_000_000), 100)
    make(store, "new", size=2_000_000)
    monkeypatch.setenv("T1_LAYERS_MAX_MB", "3")
    store.prune_now_and_then()
    assert names(store) == {"new"}
    monkeypatch.setenv("T1_LAYERS_MAX_MB", "0")
    store.prune_now_and_then()  # not again within the hour
    assert names(store) == {"new"}
    os.utime(stores.cache / "layers" / "last-pruned", (1, 1))
    store.prune_now_and_then()
    assert names(store) == set()
    monkeypatch.setenv("T1_LAYERS_MAX_MB", "much")
    with pytest.raises(ConfigError, match="number of megabytes, got 'much'"):
        store.prune_now_and_then()


# ------------------------------------------------------------------------------------------------------------------------ accidents
@pytest.mark.parametrize("damage", ["contents", "missing", "none"])
def test_a_layer_from_before_a_crash_is_counted_before_it_is_used(damage):
    store = LayerStore()
    digest = make(store, "file", size=10)
    directory = Path(store.all()[0].layers[0].path)
    manifest = directory / "layer.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "boot": "an earlier one"}))
    if damage == "contents":
        (directory / "root" / "file").write_bytes(b"")
    elif damage == "missing":
        (directory / "root" / "file").unlink()
    acquired = store.acquire(digest)
    if damage == "none":
        assert acquired is not None
        os.close(acquired[1])
        assert json.loads(manifest.read_text())["boot"] != "an earlier one"
    else:
        assert acquired is None
        assert not directory.exists()


@pytest.mark.namespaces
@pytest.mark.usefixtures("_namespaces")
def test_a_cache_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    blocked = tmp_path / "a-file"
    blocked.write_text("")
    monkeypatch.setenv("T1_CACHE_DIR", str(blocked))
    (tmp_path / "Dockerfile").write_text("FROM x\nRUN true\n")
    with pytest.raises(SandboxError, match="a-file"):
        LocalSandbox(SandboxSpec(image=ImageSource(tmp_path))).start()


def test_the_store_is_closed_to_other_users(stores):
    make(LayerStore(), "x")
    assert (stores.cache / "layers").stat().st_mode & 0o777 == 0o700


# ---------------------------------------------------------------------------------------------------------------------- the command
def test_the_command_prunes(capsys):
    store = LayerStore()
    make(store, "one", size=2_500_000)
    digest = make(store, "two", size=1_000_000)
    used(store, digest, 86400 * 40)
    assert main(["images", "list", "--layers"]) == 0
    assert "2 layers, 3.5 MB" in capsys.readouterr().out
    assert main(["images", "prune"]) == 2
    assert "--all" in capsys.readouterr().err
    assert main(["images", "prune", "--unused-days", "30"]) == 0
    assert capsys.readouterr().out == "removed 1 layers (1.0 MB), 2.5 MB stay\n"
    _, fd = store.acquire(store.all()[0].digest)
    assert main(["images", "prune", "--all"]) == 0
    assert capsys.readouterr().out == "removed 0 layers (0 B), 2.5 MB stay; 1 in use\n"
    os.close(fd)
    assert main(["images", "prune", "--max-mb", "1"]) == 0
    assert names(store) == set()
