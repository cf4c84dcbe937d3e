"""The handful of Linux system calls that Python does not wrap, through ctypes.

Every function raises ``OSError`` with the errno of the failed call and, where there is one, the path it failed on.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import os
import platform
import socket
import struct
from collections.abc import Iterable
from typing import Final

CLONE_NEWNS: Final = 0x00020000
CLONE_NEWCGROUP: Final = 0x02000000
CLONE_NEWUTS: Final = 0x04000000
CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
CLONE_NEWNET: Final = 0x40000000

MS_RDONLY: Final = 1
MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_NOEXEC: Final = 8
MS_BIND: Final = 4096
MS_REC: Final = 16384
MS_PRIVATE: Final = 1 << 18
MS_SLAVE: Final = 1 << 19
MNT_DETACH: Final = 2

MOUNT_ATTR_RDONLY: Final = 0x1
MOUNT_ATTR_NOSUID: Final = 0x2
MOUNT_ATTR_NODEV: Final = 0x4

PR_SET_PDEATHSIG: Final = 1
PR_SET_DUMPABLE: Final = 4
PR_SET_NAME: Final = 15
PR_CAPBSET_DROP: Final = 24
PR_SET_CHILD_SUBREAPER: Final = 36
PR_SET_NO_NEW_PRIVS: Final = 38

RESOLVE_NO_MAGICLINKS: Final = 0x02
RESOLVE_IN_ROOT: Final = 0x10

# Numbers above 423 are the same on every architecture.
_SYS_OPENAT2: Final = 437
_SYS_MOUNT_SETATTR: Final = 442

_SYS_KEYCTL: Final = {"x86_64": 250, "aarch64": 219, "riscv64": 219}
_KEYCTL_JOIN_SESSION_KEYRING: Final = 1

_AT_FDCWD: Final = -100
_AT_RECURSIVE: Final = 0x8000
_SIOCSIFFLAGS: Final = 0x8914
_IFF_UP: Final = 0x1
_CAPABILITY_VERSION_3: Final = 0x20080522

# What a container engine grants by default; everything else goes. The numbers are those of linux/capability.h.
KEPT_CAPABILITIES: Final = frozenset(
    {
        0,  # CHOWN
        1,  # DAC_OVERRIDE
        3,  # FOWNER
        4,  # FSETID
        5,  # KILL
        6,  # SETGID
        7,  # SETUID
        8,  # SETPCAP
        10,  # NET_BIND_SERVICE
        13,  # NET_RAW
        18,  # SYS_CHROOT
        27,  # MKNOD
        29,  # AUDIT_WRITE
        31,  # SETFCAP
    }
)

CAP_SYS_CHROOT: Final = 18

_libc = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def _check(result: int, path: str | None = None) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    return result


def _bytes(path: str | None) -> bytes | None:
    return None if path is None else os.fsencode(path)


def unshare(flags: int) -> None:
    """Move the caller (or, for pid namespaces, its next children) into new namespaces."""
    _check(_libc.unshare(ctypes.c_int(flags)))


def setns(fd: int, kind: int) -> None:
    """Move the caller into the namespace behind a descriptor; ``kind`` is its ``CLONE_NEW...`` flag."""
    _check(_libc.setns(ctypes.c_int(fd), ctypes.c_int(kind)))


def mount(source: str | None, target: str, fstype: str | None = None, flags: int = 0, data: str | None = None) -> None:
    """Attach or change a mount (mount(2))."""
    _check(_libc.mount(_bytes(source), _bytes(target), _bytes(fstype), ctypes.c_ulong(flags), _bytes(data)), target)


def umount(target: str, flags: int = MNT_DETACH) -> None:
    """umount2(2), lazily unless told otherwise."""
    _check(_libc.umount2(_bytes(target), ctypes.c_int(flags)), target)


def set_mount_attributes(target: str, attributes: int) -> None:
    """Add mount attributes (``MOUNT_ATTR_*``) to a whole mount tree, keeping those it has."""
    attr = _MountAttr(attr_set=attributes)
    result = _libc.syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR),
        ctypes.c_int(_AT_FDCWD),
        _bytes(target),
        ctypes.c_uint(_AT_RECURSIVE),
        ctypes.byref(attr),
        ctypes.c_size_t(ctypes.sizeof(attr)),
    )
    _check(int(result), target)


def bind(source: str, target: str, *, read_only: bool = False, recursive: bool = False) -> None:
    """Bind-mount a file or directory, never honouring set-uid bits in it."""
    mount(source, target, None, MS_BIND | (MS_REC if recursive else 0))
    set_mount_attributes(target, MOUNT_ATTR_NOSUID | (MOUNT_ATTR_RDONLY if read_only else 0))


def enter_root(path: str) -> None:
    """Make the mount point ``path`` the root and let go of the old root and everything mounted below it."""
    os.chdir(path)
    _check(_libc.pivot_root(b".", b"."), path)
    umount(".", MNT_DETACH)
    os.chdir("/")


def open_in_root(root_fd: int, path: str, flags: int, mode: int = 0) -> int:
    """openat2(2) that treats ``root_fd`` as ``/``: no symlink, ``..`` or magic link can lead outside it.

    Args:
        root_fd: Descriptor of the directory that acts as the root.
        path: Path inside it; a leading ``/`` means ``root_fd``.
        flags: ``os.O_*`` flags; ``O_CLOEXEC`` is added.
        mode: Permission bits for a created file.

    Returns:
        A new descriptor, owned by the caller.
    """
    how = _OpenHow(
        flags=flags | os.O_CLOEXEC,
        mode=mode if flags & os.O_CREAT else 0,
        resolve=RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS,
    )
    result = _libc.syscall(
        ctypes.c_long(_SYS_OPENAT2), ctypes.c_int(root_fd), _bytes(path), ctypes.byref(how), ctypes.c_size_t(ctypes.sizeof(how))
    )
    return _check(int(result), path)


def prctl(option: int, argument: int = 0, second: int = 0) -> None:
    """Set one process attribute that takes integers (or addresses)."""
    zero = ctypes.c_ulong(0)
    _check(_libc.prctl(ctypes.c_int(option), ctypes.c_ulong(argument), ctypes.c_ulong(second), zero, zero))


def set_process_name(name: str, detail: str = "") -> None:
    """Name this process in ``ps``, in place of the command line it was started with (which holds paths of the host).

    Args:
        name: At most 15 characters.
        detail: What the command line says behind the name.
    """
    raw = os.fsencode(f"{name} {detail}" if detail else name)
    buffer = ctypes.create_string_buffer(os.fsencode(name)[:15])
    _check(_libc.prctl(ctypes.c_int(PR_SET_NAME), buffer, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)))
    with open("/proc/self/stat", "rb") as stream:
        fields = stream.read().rpartition(b")")[2].split()
    # Fields 48 and 49 of proc(5): the kernel shows these bytes of our own memory as the command line.
    start, end = int(fields[45]), int(fields[46])
    if end > start > 0:
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, raw, min(len(raw), end - start - 1))


def set_hostname(name: str) -> None:
    """sethostname(2)."""
    raw = os.fsencode(name)
    _check(_libc.sethostname(raw, ctypes.c_size_t(len(raw))))


def drop_privileges(*, not_for_programs: Iterable[int] = ()) -> None:
    """Keep the default capabilities of a container, forbid gaining any, and make this process unreadable to its own children.

    Args:
        not_for_programs: Capabilities that this process and its forks keep and that no program they execute gets.
    """
    withheld = frozenset(not_for_programs)
    number = _SYS_KEYCTL.get(platform.machine())
    if number is not None:
        # A session keyring of its own instead of the host's. Kernels without keyrings refuse, and have nothing to leak.
        _libc.syscall(ctypes.c_long(number), ctypes.c_int(_KEYCTL_JOIN_SESSION_KEYRING), None)
    for capability in range(64):
        if capability not in KEPT_CAPABILITIES - withheld and _libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
            break  # past the kernel's last capability
    low = sum(1 << capability for capability in KEPT_CAPABILITIES if capability < 32)
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    data = struct.pack("=6I", low, low, 0, 0, 0, 0)
    _check(_libc.capset(header, data))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    # A process of the same user could otherwise trace this one, or read its memory and descriptors through /proc.
    prctl(PR_SET_DUMPABLE, 0)


def keep_only_capabilities_of_programs(withheld: Iterable[int]) -> None:
    """Give up, for good, what ``drop_privileges`` left to this process and not to the programs it executes."""
    low = sum(1 << capability for capability in KEPT_CAPABILITIES - frozenset(withheld) if capability < 32)
    _check(_libc.capset(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), struct.pack("=6I", low, low, 0, 0, 0, 0)))


def bring_loopback_up() -> None:
    """Set ``lo`` up in the current network namespace; it is the only interface there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        fcntl.ioctl(probe, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))


def close_all_except(kept: Iterable[int]) -> None:
    """Close every descriptor of this process but the given ones and 0-2."""
    previous = 2
    for fd in sorted(set(kept)):
        if fd > previous + 1:
            os.closerange(previous + 1, fd)
        previous = max(previous, fd)
    os.closerange(previous + 1, max(1 << 16, previous + 2))


def unpack_descriptors(data: bytes) -> list[int]:
    """Descriptor numbers held in an ``SCM_RIGHTS`` control message."""
    numbers = array.array("i")
    numbers.frombytes(data[: len(data) - (len(data) % numbers.itemsize)])
    return list(numbers)
