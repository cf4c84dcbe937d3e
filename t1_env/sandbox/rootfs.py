"""How a sandbox's root is put together, from the zygote's template to the mount points of one sandbox or clone.

The zygote makes one read-only template in a mount namespace of its own (``prepare_template``). A keeper stacks one sandbox's writable
layers on it, and a verification clone stacks once more on those (stacking.py). See docs/design/sandbox.md.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from t1_env.sandbox import syscalls
from t1_env.sandbox.etc import build_etc

SYSTEM_DIRS: Final = ("usr", "opt")
"""Host directories that a sandbox sees, besides the top-level ones that a merged /usr replaces by links."""

_USR_MERGED: Final = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
# The mount point of everything below is a directory that exists everywhere and that no caller ever needs: in these private mount
# namespaces it is hidden by the mount.
_MOUNT_POINTS: Final = ("/sys/kernel", "/boot", "/media", "/srv", "/mnt")
_DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty")
_DEV_LINKS: Final = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}
# Path -> permission bits of the directories every sandbox starts with.
_SKELETON: Final = {
    "boot": 0o755,
    "dev": 0o755,
    "dev/shm": 0o1777,
    "etc": 0o755,
    "home": 0o755,
    "media": 0o755,
    "mnt": 0o755,
    "opt": 0o755,
    "proc": 0o555,
    "root": 0o700,
    "run": 0o755,
    "run/lock": 0o1777,
    "srv": 0o755,
    "sys": 0o555,
    "tmp": 0o1777,
    "usr": 0o755,
    "var": 0o755,
    "var/cache": 0o755,
    "var/lib": 0o755,
    "var/log": 0o755,
    "var/mail": 0o755,
    "var/spool": 0o755,
    "var/tmp": 0o1777,
}
_SKELETON_LINKS: Final = {"var/run": "/run", "var/lock": "/run/lock"}


@dataclass(frozen=True, slots=True)
class Template:
    """What the zygote prepared and every keeper inherits.

    Args:
        base: Mount point of the template.
        layers: Names of the top-level directories that are overlays in the sandbox, ``etc`` included.
        links: Top-level symlink -> its target.
    """

    base: str
    layers: tuple[str, ...]
    links: Mapping[str, str]

    def lower(self, layer: str) -> str:
        """The read-only directory at the bottom of ``layer``."""
        return f"{self.base}/lower/{layer}"

    @property
    def store(self) -> str:
        """Where a keeper mounts the sandbox's private tmpfs."""
        return f"{self.base}/store"

    @property
    def root(self) -> str:
        """Where a keeper assembles the sandbox's root."""
        return f"{self.base}/root"

    @property
    def clone_store(self) -> str:
        """Where a clone mounts its own tmpfs."""
        return f"{self.base}/clone-store"

    @property
    def clone_root(self) -> str:
        """Where a clone assembles its root."""
        return f"{self.base}/clone-root"


def prepare_template() -> Template:
    """Build the template; the caller is alone in a fresh mount namespace that it may change.

    Raises:
        OSError: A mount was refused.
    """
    syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_SLAVE)
    base = next(path for path in _MOUNT_POINTS if os.path.isdir(path))
    syscalls.mount("t1", base, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "size=64m,mode=755")
    for name in ("lower", "store", "root", "clone-store", "clone-root"):
        os.mkdir(f"{base}/{name}", 0o755)
    layers: list[str] = []
    links: dict[str, str] = {}
    for name in (*SYSTEM_DIRS, *_USR_MERGED):
        path = f"/{name}"
        if os.path.islink(path):
            links[name] = os.readlink(path).lstrip("/")
        elif os.path.isdir(path):
            os.mkdir(f"{base}/lower/{name}", 0o755)
            syscalls.bind(path, f"{base}/lower/{name}", read_only=True)
            layers.append(name)
    os.mkdir(f"{base}/lower/etc", 0o755)
    build_etc(f"{base}/lower/etc")
    return Template(base=base, layers=(*layers, "etc"), links=links)


def mount_kernel_filesystems(root: str) -> None:
    """Mount /proc and /dev under ``root``; the caller is in the new pid and mount namespaces.

    Both are read-only: the user that is root inside owns the host's device nodes and kernel settings, and only the mount keeps it
    from changing them (writing *to* a device is not a change).
    """
    flags = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC | syscalls.MS_RDONLY
    syscalls.mount("proc", f"{root}/proc", "proc", flags)
    shm = os.open(f"{root}/dev/shm", os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        syscalls.mount("t1", f"{root}/dev", "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NOEXEC, "size=256k,mode=755")
        for name in _DEVICES:
            os.close(os.open(f"{root}/dev/{name}", os.O_CREAT | os.O_WRONLY, 0o666))
            syscalls.bind(f"/dev/{name}", f"{root}/dev/{name}", read_only=True)
        for name, target in _DEV_LINKS.items():
            os.symlink(target, f"{root}/dev/{name}")
        for name in ("shm", "pts"):
            os.mkdir(f"{root}/dev/{name}", 0o755)
        syscalls.bind(f"/proc/self/fd/{shm}", f"{root}/dev/shm")
    finally:
        os.close(shm)
    syscalls.mount("devpts", f"{root}/dev/pts", "devpts", syscalls.MS_NOSUID | syscalls.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")


def seal_dev(root: str) -> None:
    """Make the /dev directory itself read-only, once every mount point in it exists."""
    # MS_REMOUNT | MS_BIND on this one mount: its submounts (pts, shm) stay writable.
    flags = 32 | syscalls.MS_BIND | syscalls.MS_RDONLY | syscalls.MS_NOSUID | syscalls.MS_NOEXEC
    syscalls.mount(None, f"{root}/dev", None, flags)


def make_mount_point(root: str, path: str, *, directory: bool = True) -> str:
    """Make ``path`` a mount point in a clone: whatever stands in its way (a symlink, a file) is removed from the clone.

    Args:
        root: The clone's root.
        path: Absolute path inside.
        directory: Whether the last component is to be a directory rather than a file.

    Returns:
        The mount point as the caller sees it; no component of it is a symlink.
    """
    current = root
    parts = [part for part in path.split("/") if part not in ("", ".")]
    for index, name in enumerate(parts):
        current = f"{current}/{name}"
        wants_directory = directory or index < len(parts) - 1
        try:
            mode = os.lstat(current).st_mode
            if stat.S_ISDIR(mode) if wants_directory else stat.S_ISREG(mode):
                continue
            os.unlink(current)
        except FileNotFoundError:
            pass
        if wants_directory:
            os.mkdir(current, 0o755)
        else:
            os.close(os.open(current, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    return current


_SKELETON_TIME_S: Final = 1704067200
"""2024-01-01: when the skeleton's directories were last changed, the same in a sandbox and in its fork."""


def make_skeleton(root: str, template: Template) -> None:
    """Fill the empty directory ``root`` with the directories and links that every sandbox over the host's system starts with."""
    for name, mode in _SKELETON.items():
        os.mkdir(f"{root}/{name}", mode)
        os.chmod(f"{root}/{name}", mode)  # mkdir ignores the sticky bit
    for layer in template.layers:
        os.makedirs(f"{root}/{layer}", 0o755, exist_ok=True)
    links = {**_SKELETON_LINKS, **template.links}
    for name, target in links.items():
        os.symlink(target, f"{root}/{name}")
    for name in sorted({*_SKELETON, *template.layers, *links}, reverse=True):  # a directory after what lies in it
        os.utime(f"{root}/{name}", (_SKELETON_TIME_S, _SKELETON_TIME_S), follow_symlinks=False)


def make_masks(template: Template, hide: Iterable[str]) -> None:
    """Put a whiteout over every hidden path, in a layer of its own between the host's directory and the sandbox's writes.

    No process in the sandbox can take a whiteout away from a lower layer, so a hidden path does not exist there, nor in a clone.
    """
    for path in sorted(hide):
        layer, _, rest = os.path.normpath(path).lstrip("/").partition("/")
        if layer not in template.layers:
            continue
        if not rest:
            os.makedirs(f"{template.store}/empty/{layer}", 0o755)
            continue
        lower, mask = template.lower(layer), f"{template.store}/mask/{layer}"
        if not os.path.lexists(f"{lower}/{rest}"):
            continue
        os.makedirs(mask, 0o755, exist_ok=True)
        if _mask_parents(lower, mask, rest.split("/")[:-1]) and not os.path.lexists(f"{mask}/{rest}"):
            os.mknod(f"{mask}/{rest}", stat.S_IFCHR | 0o600, os.makedev(0, 0))


def _mask_parents(lower: str, mask: str, names: Iterable[str]) -> bool:
    """Make the directories above a whiteout, looking like the host's; False if one of them is hidden itself."""
    done = ""
    for name in names:
        done = f"{done}/{name}"
        if not os.path.lexists(mask + done):
            os.mkdir(mask + done)
            status = os.stat(lower + done)
            os.chmod(mask + done, stat.S_IMODE(status.st_mode))
            os.utime(mask + done, ns=(status.st_atime_ns, status.st_mtime_ns))
        elif not os.path.isdir(mask + done):
            return False
    return True
