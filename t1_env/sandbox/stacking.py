"""What lies under a sandbox's own writes, and how the overlays over it are mounted.

The root is made of *parts*. Over the host's system directories each of those is a part (``usr``, ``opt``, ``etc`` ...) and everything else
is the part ``root``; over an unpacked root filesystem there is the part ``root`` alone. Every part has, from the top: the sandbox's writes
on its tmpfs, a few files of the sandbox's own (``local``), the layers of the image with a mask below each that holds what the layer
takes away, the mask of hidden paths, and the base. See docs/design/sandbox.md and docs/images.md.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from t1_env.sandbox import files, rootfs, syscalls, trees, wire
from t1_env.sandbox.rootfs import Template

ROOT: Final = "root"
"""Name of the part that everything outside the host's system directories belongs to."""

MARKS_FILE: Final = "marks.json"
"""In a layer's directory: part -> {"whiteouts": [...], "opaque": [...]}, if there are any."""

SYSTEM_NAMES: Final = frozenset({"usr", "opt", "etc", "bin", "sbin", "lib", "lib32", "lib64", "libx32"})
"""Top-level names of the base system."""

_MAX_OPTIONS_BYTES: Final = 4000  # of the 4096 that mount(2) takes


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of an image.

    Args:
        path: Host directory with one directory for each part.
        parts: The parts that it has.
        marked: Whether it takes something away (``MARKS_FILE``).
    """

    path: str
    parts: tuple[str, ...]
    marked: bool


@dataclass(frozen=True, slots=True)
class Stack:
    """What a sandbox's root starts from.

    Args:
        rootfs: Host path of an unpacked root filesystem; None for the host's system directories.
        layers: Layers over it, bottom first.
        locks: Files to hold a shared lock on while the sandbox lives, so that nobody removes what it stands on.
        foreign: Whether an agent has written to ``rootfs``: its links then say nothing about where something of ours is to be mounted.
        identity: Device and inode of ``rootfs`` as the host process sees it, for one that is a mount: in the launcher's mount namespace
            there may be none at that path, or an older one.
        written: Host directory with what the agent wrote there, and
        below: the layers under that, topmost first, where ``rootfs`` is the mount of these.
    """

    rootfs: str | None = None
    layers: tuple[Layer, ...] = ()
    locks: tuple[str, ...] = ()
    foreign: bool = False
    identity: tuple[int, int] | None = None
    written: str | None = None
    below: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Stack:
        """The inverse of ``to_json``."""
        layers = tuple(Layer(entry["path"], tuple(entry["parts"]), entry["marked"]) for entry in data["layers"])
        identity = (data["identity"][0], data["identity"][1]) if data.get("identity") else None
        return cls(
            data["rootfs"],
            layers,
            tuple(data["locks"]),
            bool(data.get("foreign")),
            identity,
            data.get("written"),
            tuple(data.get("below", ())),
        )

    def to_json(self) -> dict[str, Any]:
        """For a message to the keeper."""
        layers = [{"path": layer.path, "parts": list(layer.parts), "marked": layer.marked} for layer in self.layers]
        fields = {"rootfs": self.rootfs, "layers": layers, "locks": list(self.locks), "foreign": self.foreign}
        return {**fields, "identity": self.identity, "written": self.written, "below": list(self.below)}

    def parts(self, template: Template) -> tuple[str, ...]:
        """Names of the parts, ``ROOT`` first."""
        return (ROOT,) if self.rootfs is not None else (ROOT, *template.layers)

    def link_target(self, template: Template, name: str) -> str:
        """Where the top-level directory ``name`` really is (``bin`` may be a link to ``usr/bin``)."""
        if self.rootfs is None:
            return template.links.get(name, name)
        if self.foreign:
            return name
        try:
            target = os.readlink(f"{self.rootfs}/{name}").strip("/")
        except OSError:
            return name  # a directory, or nothing
        return name if ".." in target.split("/") or os.path.islink(f"{self.rootfs}/{target}") else target


def build_root(
    template: Template,
    stack: Stack,
    *,
    storage_mb: int,
    workdir: str,
    hostname: str,
    hide: Iterable[str],
    copy_of: int | None = None,
) -> None:
    """Assemble the sandbox's root at ``template.root``; the caller is in the sandbox's own user and mount namespaces.

    Args:
        template: The zygote's template.
        stack: What it starts from.
        storage_mb: Size in MiB of everything that the sandbox can write.
        workdir: Absolute path created inside.
        hostname: Written to /etc/hostname and /etc/hosts.
        hide: Host paths that must not exist inside.
        copy_of: Directory that holds the writes of the sandbox that this one is a fork of.

    Raises:
        OSError: A mount was refused, or the copy failed.
    """
    store = template.store
    inodes = max(storage_mb * 1024, 65536)
    syscalls.mount("t1", store, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, f"size={storage_mb}m,nr_inodes={inodes},mode=755")
    for name in ("up", "work", "mask", "local", "layer", "taken"):
        os.mkdir(f"{store}/{name}", 0o755)
    for part in stack.parts(template):
        for kind in ("up", "work"):
            os.mkdir(f"{store}/{kind}/{part}", 0o755)
    for index, layer in enumerate(stack.layers):
        os.symlink(layer.path, f"{store}/layer/{index}")  # a short name without the characters that mount options give a meaning
        if layer.marked:
            _restore_marks(layer.path, f"{store}/taken/{index}")
    if stack.rootfs is None:
        rootfs.make_masks(template, hide)
    else:
        _check_identity(stack)
        os.symlink(stack.rootfs, f"{store}/base")
    _make_local_files(template, stack, hostname)
    if copy_of is not None:
        _copy_writes(copy_of, f"{store}/up")
    else:
        _inherit_attributes(template, stack)
    _mount_parts(template, stack)
    root_fd = os.open(template.root, os.O_PATH | os.O_DIRECTORY)
    try:
        files.make_directories(root_fd, workdir)
    finally:
        os.close(root_fd)


def _check_identity(stack: Stack) -> None:
    """What is verified must be what the host process means, and never the empty directory under a mount that does not reach here."""
    if stack.identity is not None and stack.rootfs is not None:
        status = os.stat(stack.rootfs)
        if (status.st_dev, status.st_ino) != stack.identity:
            raise OSError(errno.ESTALE, "what is mounted there does not reach the launcher of the local sandbox, or is gone", stack.rootfs)


def look_apart(stack: Stack) -> Stack:
    """Mount the layers of an agent's ``rootfs`` anew over it, read-only, in this process's mount namespace.

    Seen through the agent's own mount, every file that a verifier opens would be seen by the agent too: by a watch (inotify) on it, and by
    a lease, which makes the open wait until the agent, which stands still, gives it back. Only root outside any user namespace can do
    this: the marks of an engine's layers (trusted attributes) mean nothing to a mount of anybody else.

    Args:
        stack: One whose ``written`` and ``below`` say what ``rootfs`` is the mount of.

    Returns:
        The same for whoever shares this mount namespace.

    Raises:
        OSError: What is mounted there is something else, or the mount was refused.
    """
    assert stack.rootfs is not None, "only asked for where there is one"
    assert stack.written is not None, "only asked for where its layers are known"
    _check_identity(stack)
    names = [stack.written, *stack.below]
    syscalls.mount("t1", stack.rootfs, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "size=64k,mode=700")
    for index, path in enumerate(names):
        os.symlink(path, f"{stack.rootfs}/{index}")  # short names: all options must fit into one page
    os.chdir(stack.rootfs)
    try:
        flags = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_RDONLY
        syscalls.mount("t1", stack.rootfs, "overlay", flags, f"lowerdir={':'.join(map(str, range(len(names))))}")
    finally:
        os.chdir("/")
    return replace(stack, identity=None)


def lowers_of(template: Template, stack: Stack, part: str) -> tuple[str, ...]:
    """The read-only directories under a sandbox's own writes to ``part``, topmost first."""
    store = template.store
    lowers = [f"{store}/local/{part}"] if os.path.isdir(f"{store}/local/{part}") else []
    for index in reversed(range(len(stack.layers))):
        if part in stack.layers[index].parts:
            lowers.append(f"{store}/layer/{index}/{part}")
            if os.path.isdir(f"{store}/taken/{index}/{part}"):
                lowers.append(f"{store}/taken/{index}/{part}")
    return (*lowers, *base_of(template, stack, part))


def written_by_agent(template: Template, stack: Stack, copied: str | None = None) -> Iterator[tuple[str, str]]:
    """Directories that hold what an agent wrote, each with where that is found in its root.

    Args:
        template: The zygote's template.
        stack: What the root started from.
        copied: Directory of a copy to look at instead.
    """
    if stack.written is not None:
        yield stack.written, ""
    for part in stack.parts(template):
        yield f"{copied or f'{template.store}/up'}/{part}", "" if part == ROOT else f"/{part}"


def export_writes(template: Template, stack: Stack, target: str) -> tuple[tuple[str, ...], trees.Copied]:
    """Copy what the (frozen) sandbox wrote into the existing, empty host directory ``target`` as a layer.

    Returns:
        The parts that the layer has, and what was copied.

    Raises:
        OSError: The copy failed.
    """
    total, parts, marks = trees.Copied(), [], {}
    for part in stack.parts(template):
        written = f"{template.store}/up/{part}"
        if not os.listdir(written) and _attributes(written) == _attributes(_topmost(template, stack, part)):
            continue
        os.mkdir(f"{target}/{part}", 0o755)
        copied, found = _copy(written, f"{target}/{part}", "collect")
        total = total.plus(copied)
        parts.append(part)
        if found.whiteouts or found.opaque:
            marks[part] = {"whiteouts": sorted(found.whiteouts), "opaque": sorted(found.opaque)}
    if marks:
        with open(f"{target}/{MARKS_FILE}", "w", encoding="ascii") as stream:
            json.dump(marks, stream)
    return tuple(parts), total


def lend(borrower: socket.socket, written: str, host: socket.socket) -> None:
    """Hand the directory ``written`` to the keeper of a fork and wait until it has copied it, or is gone.

    Raises:
        Disconnected: The host process is gone.
    """
    fd = os.open(written, os.O_RDONLY | os.O_DIRECTORY)
    host_is_gone = False
    try:
        with contextlib.suppress(wire.Disconnected):
            wire.send(borrower, {}, [fd])
            poller = select.poll()
            poller.register(borrower, select.POLLIN)
            poller.register(host, select.POLLRDHUP)
            host_is_gone = any(ready == host.fileno() for ready, _ in poller.poll())
    finally:
        os.close(fd)
    if host_is_gone:
        raise wire.Disconnected


def borrow(lender: socket.socket) -> int:
    """Receive the directory that another keeper lends; the caller closes it.

    Raises:
        OSError: The other sandbox is gone.
    """
    try:
        _, fds = wire.receive(lender)
    except wire.Disconnected as error:
        raise OSError(errno.EPIPE, "the sandbox to be copied is gone") from error
    return fds[0]


def give_back(lender: socket.socket) -> None:
    """Say that the copy is complete."""
    lender.close()


def base_of(template: Template, stack: Stack, part: str) -> tuple[str, ...]:
    """The bottom of a part: what is there without image, layers and writes."""
    store = template.store
    if stack.rootfs is not None:
        return (f"{store}/base",)
    if part == ROOT:
        return (f"{store}/skeleton",)
    if os.path.isdir(f"{store}/empty/{part}"):
        return (f"{store}/empty/{part}",)
    mask = f"{store}/mask/{part}"
    return (mask, template.lower(part)) if os.path.isdir(mask) else (template.lower(part),)


def _make_local_files(template: Template, stack: Stack, hostname: str) -> None:
    """What belongs to this one sandbox and must not end up in a layer: its name, and the mount points of kernel filesystems.

    These lie above every layer, so no image can put a symlink where /proc or /dev is going to be mounted.
    """
    local = f"{template.store}/local"
    etc = f"{local}/etc" if stack.rootfs is None else f"{local}/{ROOT}/etc"
    os.makedirs(etc, 0o755)
    for name, text in (
        ("hostname", f"{hostname}\n"),
        ("hosts", f"127.0.0.1\tlocalhost {hostname}\n::1\tlocalhost ip6-localhost\n"),
    ):
        with open(f"{etc}/{name}", "w", encoding="utf-8") as stream:
            stream.write(text)
    mount_points = {"dev": 0o755, "dev/shm": 0o1777, "proc": 0o555, "sys": 0o555}
    if stack.rootfs is None:
        os.mkdir(f"{template.store}/skeleton", 0o755)
        rootfs.make_skeleton(f"{template.store}/skeleton", template)
    elif not os.path.lexists(f"{stack.rootfs}/tmp"):
        mount_points["tmp"] = 0o1777
    for name, mode in mount_points.items():
        os.makedirs(f"{local}/{ROOT}/{name}", exist_ok=True)
        os.chmod(f"{local}/{ROOT}/{name}", mode)


def _mount_parts(template: Template, stack: Stack) -> None:
    store = template.store
    for part in stack.parts(template):
        target = template.root if part == ROOT else f"{template.root}/{part}"
        overlay(target, store, lowers_of(template, stack, part), f"{store}/up/{part}", f"{store}/work/{part}")


def overlay(target: str, store: str, lowers: tuple[str, ...], upper: str, work: str) -> None:
    """Mount an overlay. All options must fit into one page, so the lower directories are given relative to ``store``."""
    short = ":".join(path.removeprefix(f"{store}/") for path in lowers)
    data = f"lowerdir={short},upperdir={upper},workdir={work},userxattr"
    if len(data) > _MAX_OPTIONS_BYTES:
        raise OSError(errno.E2BIG, f"the image has too many layers ({len(lowers)} directories to stack)", target)
    os.chdir(store)
    try:
        syscalls.mount("t1", target, "overlay", syscalls.MS_NOSUID | syscalls.MS_NODEV, data)
    finally:
        os.chdir("/")


def _inherit_attributes(template: Template, stack: Stack) -> None:
    """The attributes of an overlay's top are those of its upper directory: they start as what lies below."""
    for part in stack.parts(template):
        topmost = _topmost(template, stack, part)
        if topmost is not None:
            copy_attributes(topmost, f"{template.store}/up/{part}")


def _topmost(template: Template, stack: Stack, part: str) -> str | None:
    """The directory that says what the top of a part looks like before anything is written; None for one of root's own."""
    for index in reversed(range(len(stack.layers))):
        if part in stack.layers[index].parts:
            return f"{template.store}/layer/{index}/{part}"
    # Not the host's own directory: its owner need not exist inside.
    return f"{template.store}/base" if stack.rootfs is not None else None


def _restore_marks(layer: str, target: str) -> None:
    """Make the mask below a layer: a tree that holds nothing but its whiteouts and opaque directories."""
    with open(f"{layer}/{MARKS_FILE}", encoding="ascii") as stream:
        marks = json.load(stream)
    for part, found in marks.items():
        for path in found["opaque"]:
            os.makedirs(f"{target}/{part}/{path}", 0o755, exist_ok=True)
            os.setxattr(f"{target}/{part}/{path}", trees.OPAQUE, b"y")
        for path in found["whiteouts"]:
            os.makedirs(os.path.dirname(f"{target}/{part}/{path}"), 0o755, exist_ok=True)
            os.mknod(f"{target}/{part}/{path}", stat.S_IFCHR | 0o600, os.makedev(0, 0))


def _copy_writes(source_fd: int, target: str) -> None:
    target_fd = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in os.listdir(target):
            os.rmdir(f"{target}/{name}")
        trees.copy_tree(source_fd, target_fd, overlay="keep")
    except OSError as error:
        # Not the errno: the caller takes some for a kernel that refuses namespaces.
        raise OSError(errno.EIO, f"the files of the other sandbox could not be copied: {error.strerror}", error.filename) from error
    finally:
        os.close(target_fd)


def _copy(source: str, target: str, overlay: Literal["keep", "collect", "drop"]) -> tuple[trees.Copied, trees.Marks]:
    source_fd = os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    target_fd = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        return trees.copy_tree(source_fd, target_fd, overlay=overlay)
    finally:
        os.close(source_fd)
        os.close(target_fd)


def _attributes(path: str | None) -> tuple[int, int, int]:
    if path is None:
        return 0, 0, 0o755
    status = os.stat(path)
    return status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)


def copy_attributes(source: str, target: str) -> None:
    """The attributes of a merged directory are those of its topmost layer."""
    status = os.stat(source)
    os.chown(target, status.st_uid, status.st_gid)
    os.chmod(target, stat.S_IMODE(status.st_mode))
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
