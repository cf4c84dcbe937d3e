"""From a task's image to a stack of cached layers: every step is carried out once, in a sandbox of its own, and kept."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from t1_env.errors import ConfigError, ImageBuildError, SandboxError
from t1_env.sandbox.accounts import Account
from t1_env.sandbox.base import BuiltEnvironment, ImageSource, SandboxSpec
from t1_env.sandbox.build import Executor
from t1_env.sandbox.images import Found, Image, ImageError, ImageStore, data_root
from t1_env.sandbox.keeper import BASE_ENV
from t1_env.sandbox.layers import LayerInfo, LayerStore, cache_root, chain_digest
from t1_env.sandbox.local import LocalSandbox, SandboxFileError
from t1_env.sandbox.recipe import Base, Copy, Recipe, Step, line_error, read_recipe
from t1_env.sandbox.stacking import MARKS_FILE, Stack

_STORAGE_MB: Final = 4096
_MEMORY_MB: Final = 8192
_MAX_PROCESSES: Final = 1024
_ATTEMPTS: Final = 5


@dataclass(frozen=True, slots=True)
class Prepared:
    """An image, ready to start sandboxes from.

    Args:
        stack: What to stack.
        account: Whom processes run as; None for root.
        built: Its settings.
    """

    stack: Stack
    account: Account | None
    built: BuiltEnvironment


@contextlib.contextmanager
def prepared(image: ImageSource, hide: tuple[Path, ...]) -> Iterator[Prepared]:
    """Find or build what a task's image comes to. What it stands on cannot be removed inside the block.

    Args:
        image: What the task asks for.
        hide: Host paths that the steps of a build must not see.

    Raises:
        ImageBuildError: The image cannot be built; names the Dockerfile line.
        SandboxUnavailable: This machine cannot run the local sandbox.
    """
    store = ImageStore()
    with contextlib.ExitStack() as held:
        ready = None if image.docker_image is None else store.get(image.docker_image)
        if ready is not None or image.environment_dir is None:
            found = _without_dockerfile(store, image, ready)
            _hold_image(store, found.image, held)
            yield _prepare(store, found, None, _settings(found), None)
            return
        try:
            ready_made = _Build(store, image, hide, held).run()
        except OSError as error:
            if isinstance(error, SandboxError):
                raise
            where = f"{cache_root()} or {data_root()}"
            raise SandboxError(
                f"the stores of images and layers ({where}) cannot be used: {error.strerror}: {error.filename}; "
                "make room there, or name other directories with T1_CACHE_DIR and T1_DATA_DIR"
            ) from error
        yield ready_made


def describe(image: ImageSource) -> BuiltEnvironment:
    """What the local sandbox makes of an image, without building anything: base, settings and notes (not the user).

    Raises:
        ImageBuildError: The Dockerfile cannot be read, or its base is not here and must not be replaced.
    """
    store = ImageStore()
    ready = None if image.docker_image is None else store.get(image.docker_image)
    if ready is not None or image.environment_dir is None:
        return _settings(_without_dockerfile(store, image, ready))
    found: list[Found] = []

    def base(name: str, line: int) -> Base:
        found.append(_from(store, name, f"{image.environment_dir}/Dockerfile", line))
        return _base(found[-1])

    recipe = read_recipe(image.environment_dir, base)
    return BuiltEnvironment(recipe.env, recipe.workdir, None, found[0].said, recipe.notes)


class _Build:
    """One look-up of an image's layers, and the building of those that are missing."""

    def __init__(self, store: ImageStore, image: ImageSource, hide: tuple[Path, ...], held: contextlib.ExitStack) -> None:
        assert image.environment_dir is not None
        self._store = store
        self._layers = LayerStore()
        self._path = f"{image.environment_dir}/Dockerfile"
        self._deadline = time.monotonic() + image.build_timeout_s
        self._hide = hide
        self._held = held
        self._found: Found | None = None
        self._recipe = read_recipe(image.environment_dir, self._resolve)

    def run(self) -> Prepared:
        assert self._found is not None
        digest, chain = self._found.digest, []
        for steps in _groups(self._recipe.steps):
            for step in steps:
                digest = chain_digest(digest, step.key)
            chain.append((steps, digest))
        top = self._acquire_all(chain)
        recipe, user = self._recipe, None if top is None or top.account is None else str(top.account["name"])
        built = BuiltEnvironment(recipe.env, recipe.workdir, user, self._found.said, recipe.notes)
        return _prepare(self._store, self._found, self._layers, built, top)

    def _resolve(self, name: str, line: int) -> Base:
        self._found = _from(self._store, name, self._path, line)
        _hold_image(self._store, self._found.image, self._held)
        return _base(self._found)

    def _acquire_all(self, chain: list[tuple[list[Step], str]]) -> LayerInfo | None:
        """Hold the last layer of the chain; make those that are missing, from the lowest up."""
        top, missing = None, len(chain)
        while missing > 0 and top is None:
            missing -= 1
            top = self._acquire(chain[missing][1])
        for steps, digest in chain[missing + 1 if top is not None else 0 :]:
            for _ in range(_ATTEMPTS):
                self._make(steps, digest, top)
                made = self._acquire(digest)
                if made is not None:
                    break  # else somebody pruned it just now
            else:
                reason = "the layer is removed as soon as it is built; is `images prune` running all the time?"
                raise line_error(self._recipe.name, steps[-1].line, reason)
            top = made
        return top

    def _acquire(self, digest: str) -> LayerInfo | None:
        acquired = self._layers.acquire(digest)
        if acquired is None:
            return None
        self._held.callback(os.close, acquired[1])
        return acquired[0]

    def _make(self, steps: list[Step], digest: str, below: LayerInfo | None) -> None:
        with self._layers.making(digest, self._deadline) as private:
            if self._layers.has(digest):
                return  # another process was faster
            assert self._found is not None
            image = self._found.image
            account = below.account if below is not None else None if image is None else image.account
            stack = _stack(self._store, self._found, self._layers, below)
            builder = _Builder(stack, account, self._hide)
            with builder:
                executor = _LayerExecutor(builder, self._recipe, self._deadline)
                for step in steps:
                    executor.execute(step)
                try:
                    written = builder.export(private)
                except SandboxFileError as error:
                    raise line_error(self._recipe.name, steps[-1].line, f"the layer could not be written to {private}: {error}") from error
            manifest = {
                "parts": written["parts"],
                "marked": os.path.exists(f"{private}/{MARKS_FILE}"),
                "entries": written["entries"],
                "size_bytes": written["size_bytes"],
                "account": builder.account,
                "instruction": "; ".join(step.shown for step in steps),
                "base": self._found.digest,
            }
            self._layers.commit(private, digest, manifest, below)
        self._layers.prune_now_and_then()


def _groups(steps: tuple[Step, ...]) -> list[list[Step]]:
    """The steps of each layer: a ``RUN`` and what stands before it. What takes no time to do again needs no layer of its own."""
    groups: list[list[Step]] = []
    for step in steps:
        if not groups or groups[-1][-1].keyword == "RUN":
            groups.append([])
        groups[-1].append(step)
    return groups


class _Builder(LocalSandbox):
    """The sandbox in which one step is carried out."""

    def __init__(self, stack: Stack, account: Mapping[str, Any] | None, hide: tuple[Path, ...]) -> None:
        super().__init__(SandboxSpec(workdir="/", memory_mb=_MEMORY_MB, storage_mb=_STORAGE_MB, max_processes=_MAX_PROCESSES, hide=hide))
        self._stack = stack
        self._account = None if account is None else Account.from_json(account)

    @property
    def account(self) -> dict[str, Any] | None:
        """Whom processes run as, as JSON; None for root."""
        return None if self._account is None else self._account.to_json()

    def become(self, user: str) -> None:
        """Have later processes run as somebody else."""
        account = Account.from_json(self.account_of(user))
        self._account = None if (account.uid, account.gid) == (0, 0) else account

    def account_of(self, user: str) -> dict[str, Any]:
        """Look a user up."""
        return dict(self._ask_files({"op": "account", "user": user})[0]["account"])

    def make_directory(self, path: str) -> None:
        """Make a directory that belongs to the present user."""
        owner = None if self._account is None else (self._account.uid, self._account.gid)
        self._ask_files({"op": "mkdir", "dest": path, "owner": owner})

    def put_owned(self, source: Path | bytes, dest: str, mode: int | None, owner: tuple[int, int] | None, left_out: frozenset[str]) -> None:
        """``put`` that gives what it writes to somebody."""
        if isinstance(source, Path) and source.is_dir():
            request = {"op": "put_tree", "source": str(source), "dest": dest, "owner": owner, "left_out": sorted(left_out), "mode": mode}
            self._ask_files(request)
            return
        request = {"op": "put", "dest": dest, "mode": mode, "owner": owner, "times_ns": None}
        if isinstance(source, bytes):
            with tempfile.TemporaryFile() as text:
                text.write(source)
                text.seek(0)
                self._ask_files(request, [text.fileno()])
            return
        with source.open("rb") as stream:
            status = os.fstat(stream.fileno())
            self._ask_files({**request, "times_ns": [status.st_atime_ns, status.st_mtime_ns]}, [stream.fileno()])

    def unpack(self, source: Path, dest: str) -> None:
        """Unpack an archive below ``dest``."""
        with source.open("rb") as stream:
            self._ask_files({"op": "unpack", "dest": dest}, [stream.fileno()])

    def export(self, target: str) -> dict[str, Any]:
        """Write what this sandbox changed into a host directory."""
        return self._ask_files({"op": "export", "target": target})[0]


class _LayerExecutor(Executor):
    """Steps in a builder, where there are users and archives."""

    def __init__(self, builder: _Builder, recipe: Recipe, deadline: float) -> None:
        super().__init__(builder, recipe, deadline)
        self._builder = builder

    def become(self, step: Step) -> None:
        self._builder.become(step.user)

    def make_directory(self, path: str) -> None:
        self._builder.make_directory(path)

    def copy_tree(self, copy: Copy, source: Path) -> None:
        self._builder.put_owned(source, copy.dest, copy.mode, self._owner(copy), copy.left_out)

    def copy_file(self, copy: Copy, source: Path | bytes) -> None:
        self._builder.put_owned(source, copy.dest, copy.mode, self._owner(copy), frozenset())

    def unpack(self, copy: Copy, source: Path) -> None:
        self._builder.unpack(source, copy.dest)

    def _owner(self, copy: Copy) -> tuple[int, int] | None:
        if copy.owner is None:
            return None
        account = self._builder.account_of(copy.owner)
        return account["uid"], account["gid"]


# -------------------------------------------------------------------------------------------------------------------------- bases
def _from(store: ImageStore, name: str, dockerfile: str, line: int) -> Found:
    if name == "scratch":
        raise line_error(dockerfile, line, "FROM scratch: an empty base has no shell to build or play with; name an image")
    try:
        found = store.find(name)
    except (ConfigError, ImageError) as error:
        raise line_error(dockerfile, line, f"FROM {name}: {error}") from error
    if found is None:
        raise line_error(
            dockerfile,
            line,
            f"FROM {name}: no such image was imported. Import one (t1-env images import FILE --name NAME) or say what to use instead "
            f"(t1-env images map {json.dumps(name)} NAME)",
        )
    return found


def _base(found: Found) -> Base:
    image = found.image
    if image is None:
        return Base(path=BASE_ENV["PATH"])
    return Base(image.env, image.env.get("PATH", BASE_ENV["PATH"]), image.workdir)


def _without_dockerfile(store: ImageStore, image: ImageSource, ready: Image | None) -> Found:
    if ready is not None:
        return Found(ready, ready.digest, f"{image.docker_image} (imported)")
    found = None if image.docker_image is None else store.find(image.docker_image)
    if found is None and image.docker_image is not None:
        raise ImageBuildError(
            f"docker_image {image.docker_image}: no such image was imported; run t1-env images import FILE --name {image.docker_image}"
        )
    return found if found is not None else Found(None, "", "this machine's own system directories")


def _settings(found: Found) -> BuiltEnvironment:
    image = found.image
    if image is None:
        return BuiltEnvironment(base=found.said)
    return BuiltEnvironment(image.env, image.workdir, image.user or None, found.said, image.notes)


def _hold_image(store: ImageStore, image: Image | None, held: contextlib.ExitStack) -> None:
    if image is not None:
        fd = store.hold(image)
        if fd is None:
            raise ImageBuildError(f"image {image.digest} was removed just now; import it again")
        held.callback(os.close, fd)


def _prepare(store: ImageStore, found: Found, layers: LayerStore | None, built: BuiltEnvironment, top: LayerInfo | None) -> Prepared:
    account = found.image.account if top is None and found.image is not None else None if top is None else top.account
    return Prepared(_stack(store, found, layers, top), None if account is None else Account.from_json(account), built)


def _stack(store: ImageStore, found: Found, layers: LayerStore | None, top: LayerInfo | None) -> Stack:
    locks = [] if found.image is None else [store.lock_path(found.image)]
    if layers is not None and top is not None:
        locks.append(layers.lock_path(top.digest))
    stack = Stack(rootfs=None if found.image is None else found.image.rootfs, locks=tuple(locks))
    return stack if top is None else replace(stack, layers=top.layers)
