"""The system calls that nothing inside a sandbox may make: a seccomp filter, assembled here and installed through prctl(2).

The filter denies what a container engine's default profile denies: whatever could change the machine, make namespaces and mounts, or
reach the parts of the kernel where most of its privilege-escalation bugs were found. It is a list of what is denied rather than of what
is allowed, closed at the top: a number that is newer than this list does not exist inside.

Everything else works as usual: threads, ``ptrace`` among the processes inside, sockets of the ordinary families, ``chroot``.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from t1_env.sandbox import syscalls

CAPABILITY: Final = "syscall_filter"
"""What ``Sandbox.capabilities`` holds where the filter is installed."""

_PR_SET_SECCOMP: Final = 22
_SECCOMP_MODE_FILTER: Final = 2
_RET_ALLOW: Final = 0x7FFF0000
_RET_ERRNO: Final = 0x00050000

# Classic BPF: class, size, mode and operation of linux/filter.h; offsets into struct seccomp_data of linux/seccomp.h.
_LOAD: Final = 0x20
_JUMP_EQUAL: Final = 0x15
_JUMP_ABOVE: Final = 0x25
_JUMP_AT_LEAST: Final = 0x35
_JUMP_ANY_BIT: Final = 0x45
_RETURN: Final = 0x06
_INSTRUCTION: Final = struct.Struct("=HBBI")
_OFFSET_NUMBER: Final = 0
_OFFSET_ARCHITECTURE: Final = 4
_OFFSET_ARGUMENTS: Final = 16  # 8 bytes each; every value looked at fits the low half, which comes first (little-endian machines only)

_NAMESPACE_FLAGS: Final = (
    syscalls.CLONE_NEWNS
    | syscalls.CLONE_NEWCGROUP
    | syscalls.CLONE_NEWUTS
    | syscalls.CLONE_NEWIPC
    | syscalls.CLONE_NEWUSER
    | syscalls.CLONE_NEWPID
    | syscalls.CLONE_NEWNET
)
_SOCKET_FAMILIES: Final = (1, 2, 10, 16, 17)  # unix, inet, inet6, netlink, packet
"""Any other would have the kernel load a module; ``vsock`` would reach the hypervisor around the network namespace."""
_PERSONALITIES: Final = (0x0, 0x8, 0x20000, 0x20008, 0x40000, 0xFFFFFFFF)  # Linux, 32-bit, old uname, no address randomisation, "ask"
_INJECTING_IOCTLS: Final = (0x5412, 0x541C)  # TIOCSTI and TIOCLINUX type into a terminal as if its user did
_NEWEST: Final = 469  # file_setattr of Linux 6.17
_SKIPPED: Final = 0xFFFFFFFF  # a tracer has cancelled the call

_LINEAR: Final = 4
"""Up to how many numbers are compared one after the other."""

_X86_64: Final = 0
_GENERIC: Final = 1
# Name -> number on x86_64, and on the architectures that share the generic table (aarch64, riscv64); None where it does not exist.
_DENIED: Final[dict[str, tuple[int | None, int | None]]] = {
    # mounts and namespaces
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "statmount": (457, 457),
    "listmount": (458, 458),
    "open_tree_attr": (467, 467),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    # the machine
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "create_module": (174, None),
    "query_module": (178, None),
    "get_kernel_syms": (177, None),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "nfsservctl": (180, 42),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "vhangup": (153, 58),
    "syslog": (103, 116),
    "iopl": (172, None),
    "ioperm": (173, None),
    # the clock
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    # keyrings are not in any namespace
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # large and buggy corners of the kernel
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "kcmp": (312, 272),
    "lookup_dcookie": (212, 18),
    "uselib": (134, None),
    "ustat": (136, None),
    "sysfs": (139, None),
    "_sysctl": (156, None),
    "afs_syscall": (183, None),
    "vserver": (236, None),
    # memory placement: the machine's, not the sandbox's
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "get_mempolicy": (239, 236),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "set_mempolicy_home_node": (450, 450),
    "lsm_set_self_attr": (460, 460),
}
_EXAMINED: Final[dict[str, tuple[int, int]]] = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "personality": (135, 92),
    "ioctl": (16, 29),
}
# Machine -> its AUDIT_ARCH_* of linux/audit.h and the column of the tables above.
_MACHINES: Final = {
    "x86_64": (0xC000003E, _X86_64),
    "aarch64": (0xC00000B7, _GENERIC),
    "riscv64": (0xC00000F3, _GENERIC),
}


@dataclass(frozen=True, slots=True)
class _Instruction:
    code: int
    value: int
    if_true: int = 0
    if_false: int = 0


def denied_calls(machine: str) -> dict[str, int]:
    """Names and numbers of the system calls that always fail on ``machine``; empty for a machine without a filter."""
    if machine not in _MACHINES:
        return {}
    column = _MACHINES[machine][1]
    return {name: number for name, numbers in _DENIED.items() if (number := numbers[column]) is not None}


@functools.cache
def build_filter(machine: str) -> bytes | None:
    """Assemble the filter.

    Args:
        machine: As ``platform.machine()`` names it.

    Returns:
        A classic BPF program (an array of ``struct sock_filter``), or None for a machine without a table of numbers.
    """
    if machine not in _MACHINES:
        return None
    architecture, _ = _MACHINES[machine]
    program = [
        # Another architecture's table (32-bit programs on a 64-bit kernel) would make all numbers below mean something else.
        _Instruction(_LOAD, _OFFSET_ARCHITECTURE),
        _Instruction(_JUMP_EQUAL, architecture, 1, 0),
        _error(errno.ENOSYS),
        _Instruction(_LOAD, _OFFSET_NUMBER),
        *_if(_SKIPPED, [_allow()]),
        # Also catches x32, whose numbers start at 1 << 30.
        _Instruction(_JUMP_ABOVE, _NEWEST, 0, 1),
        _error(errno.ENOSYS),
        *_search(sorted(_answers(machine).items())),
    ]
    return b"".join(_INSTRUCTION.pack(step.code, step.if_true, step.if_false, step.value) for step in program)


@functools.cache
def available() -> bool:
    """Whether this kernel filters system calls and this machine's numbers are known."""
    if not _is_native() or build_filter(platform.machine()) is None:
        return False
    try:
        # A filter at address 0 is a fault where filters exist, and an invalid argument where the kernel was built without them.
        syscalls.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER)
    except OSError as error:
        return error.errno == errno.EFAULT
    return False


def install() -> None:
    """Put the calling process, and every process it will start, behind the filter for good; needs ``no_new_privs``.

    Raises:
        OSError: The kernel refused, or there is no filter for this machine.
    """
    program = build_filter(platform.machine())
    if program is None or not _is_native():
        raise OSError(errno.ENOSYS, f"no system-call filter for {platform.machine()}")
    buffer = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: a count, padding, a pointer.
    description = ctypes.create_string_buffer(struct.pack("@HP", len(program) // _INSTRUCTION.size, ctypes.addressof(buffer)))
    syscalls.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(description))


def _is_native() -> bool:
    """Whether this interpreter is a 64-bit program, as the machine's table is for."""
    return os.name == "posix" and struct.calcsize("P") == 8


def _answers(machine: str) -> dict[int, list[_Instruction]]:
    """What is done with each system call that is not simply allowed: number -> instructions that end with a return."""
    column = _MACHINES[machine][1]
    refused = {number: [_error(errno.EPERM)] for number in denied_calls(machine).values()}
    examined = {
        # Its flags are behind a pointer, which no filter can follow; C libraries fall back to clone.
        "clone3": [_error(errno.ENOSYS)],
        "clone": [_argument(0), _Instruction(_JUMP_ANY_BIT, _NAMESPACE_FLAGS, 0, 1), _error(errno.EPERM), _allow()],
        "ioctl": [_argument(1), *_one_of(_INJECTING_IOCTLS, _error(errno.EPERM)), _allow()],
        "socket": [_argument(0), *_one_of(_SOCKET_FAMILIES, _allow()), _error(errno.EAFNOSUPPORT)],
        "socketpair": [_argument(0), *_one_of(_SOCKET_FAMILIES, _allow()), _error(errno.EAFNOSUPPORT)],
        "personality": [_argument(0), *_one_of(_PERSONALITIES, _allow()), _error(errno.EPERM)],
    }
    return refused | {_EXAMINED[name][column]: body for name, body in examined.items()}


def _search(answers: Sequence[tuple[int, list[_Instruction]]]) -> list[_Instruction]:
    """A binary search for the loaded number: the kernel runs the whole filter for every number when it is installed."""
    if len(answers) <= _LINEAR:
        return [*(step for number, body in answers for step in _if(number, body)), _allow()]
    middle = len(answers) // 2
    below, rest = _search(answers[:middle]), _search(answers[middle:])
    return [_Instruction(_JUMP_AT_LEAST, answers[middle][0], len(below), 0), *below, *rest]


def _argument(index: int) -> _Instruction:
    return _Instruction(_LOAD, _OFFSET_ARGUMENTS + 8 * index)


def _allow() -> _Instruction:
    return _Instruction(_RETURN, _RET_ALLOW)


def _error(code: int) -> _Instruction:
    return _Instruction(_RETURN, _RET_ERRNO | code)


def _if(value: int, body: list[_Instruction]) -> list[_Instruction]:
    """Run ``body``, which ends with a return, if the loaded word is ``value``."""
    return [_Instruction(_JUMP_EQUAL, value, 0, len(body)), *body]


def _one_of(values: Iterable[int], then: _Instruction) -> list[_Instruction]:
    return [step for value in values for step in _if(value, [then])]
