"""System calls that nothing inside a sandbox may make: what the filter says, and what the kernel makes of it."""

from __future__ import annotations

import errno
import platform
import struct

import pytest

from t1_env.sandbox import seccomp
from t1_env.sandbox.base import SandboxSpec
from t1_env.sandbox.local import LocalSandbox, unavailable_reason

MACHINES = ("x86_64", "aarch64", "riscv64")
ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7, "riscv64": 0xC00000F3, "i386": 0x40000003, "arm": 0x40000028}
READ = {"x86_64": 0, "aarch64": 63, "riscv64": 63}
CLONE = {"x86_64": 56, "aarch64": 220, "riscv64": 220}
SOCKET = {"x86_64": 41, "aarch64": 198, "riscv64": 198}
SOCKETPAIR = {"x86_64": 53, "aarch64": 199, "riscv64": 199}
IOCTL = {"x86_64": 16, "aarch64": 29, "riscv64": 29}
PERSONALITY = {"x86_64": 135, "aarch64": 92, "riscv64": 92}
PTRACE = {"x86_64": 101, "aarch64": 117, "riscv64": 117}
EXECVE = {"x86_64": 59, "aarch64": 221, "riscv64": 221}
CLONE3 = 435


# ------------------------------------------------------------------------------------------------------------------------ the filter
def verdict(machine: str, number: int, *arguments: int, architecture: str | None = None) -> int:
    """What the filter for ``machine`` answers: 0 for "allowed", else the errno."""
    program = seccomp.build_filter(machine)
    assert program is not None
    words = (*arguments, *([0] * (6 - len(arguments))))
    data = struct.pack("<IIQ6Q", number & 0xFFFFFFFF, ARCHITECTURE[architecture or machine], 0, *words)
    steps = list(struct.iter_unpack("=HBBI", program))
    position = accumulator = 0
    while True:
        code, if_true, if_false, value = steps[position]
        position += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == 0x06:
            return 0 if value == 0x7FFF0000 else value & 0xFFFF
        else:
            taken = {0x15: accumulator == value, 0x25: accumulator > value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}
            position += if_true if taken[code] else if_false


@pytest.mark.parametrize("machine", MACHINES)
def test_every_number_is_answered_as_its_name_says(machine: str) -> None:
    denied = set(seccomp.denied_calls(machine).values())
    assert len(denied) > 40
    for number in range(470):
        if number in denied:
            assert verdict(machine, number) == errno.EPERM, number
        elif number == CLONE3:
            assert verdict(machine, number) == errno.ENOSYS
        elif number not in (SOCKET[machine], SOCKETPAIR[machine]):
            assert verdict(machine, number) == 0, number


@pytest.mark.parametrize("machine", MACHINES)
def test_what_programs_live_on_is_allowed(machine: str) -> None:
    for numbers in (READ, EXECVE, PTRACE):
        assert verdict(machine, numbers[machine]) == 0
    for family in (1, 2, 10, 16, 17):
        assert verdict(machine, SOCKET[machine], family) == 0
        assert verdict(machine, SOCKETPAIR[machine], family) == 0
    thread = 0x003D0F00  # what pthread_create asks for
    assert verdict(machine, CLONE[machine], thread) == 0
    assert verdict(machine, CLONE[machine], 0x4111) == 0  # vfork
    assert verdict(machine, IOCTL[machine], 0, 0x5401) == 0
    for persona in (0, 0x40000, 0xFFFFFFFF):
        assert verdict(machine, PERSONALITY[machine], persona) == 0


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("flag", [0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000])
def test_clone_makes_no_namespace(machine: str, flag: int) -> None:
    assert verdict(machine, CLONE[machine], flag | 17) == errno.EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_arguments_are_examined(machine: str) -> None:
    for family in (38, 40, 21, 30, 31, 99):
        assert verdict(machine, SOCKET[machine], family) == errno.EAFNOSUPPORT
        assert verdict(machine, SOCKETPAIR[machine], family) == errno.EAFNOSUPPORT
    for request in (0x5412, 0x541C, 0x5412 | 1 << 32):  # the kernel looks at the low half of the request
        assert verdict(machine, IOCTL[machine], 0, request) == errno.EPERM
    assert verdict(machine, PERSONALITY[machine], 0x0400000) == errno.EPERM  # READ_IMPLIES_EXEC
    assert verdict(machine, PERSONALITY[machine], 0x0400000 | 0x40000) == errno.EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_numbers_from_the_future_do_not_exist_and_cancelled_calls_pass(machine: str) -> None:
    for number in (470, 471, 511, 1023, 1 << 30, (1 << 30) + 39, 1 << 31, 0xFFFFFFFE):
        assert verdict(machine, number) == errno.ENOSYS
    assert verdict(machine, -1) == 0


@pytest.mark.parametrize(("machine", "other"), [("x86_64", "i386"), ("aarch64", "arm"), ("x86_64", "aarch64")])
def test_another_architectures_calls_do_not_exist(machine: str, other: str) -> None:
    for number in range(500):
        assert verdict(machine, number, architecture=other) == errno.ENOSYS


def test_a_machine_without_a_table_has_no_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seccomp.build_filter("sparc64") is None
    assert seccomp.denied_calls("sparc64") == {}
    monkeypatch.setattr(platform, "machine", lambda: "sparc64")
    assert seccomp.available.__wrapped__() is False
    with pytest.raises(OSError, match="sparc64"):
        seccomp.install()


def test_a_kernel_without_filters_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(option: int, argument: int = 0, second: int = 0) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(seccomp.syscalls, "prctl", refuse)
    assert seccomp.available.__wrapped__() is False


# ------------------------------------------------------------------------------------------------------------------------ the kernel
@pytest.fixture(scope="module")
def box():
    if reason := unavailable_reason():
        pytest.skip(reason)
    with LocalSandbox(SandboxSpec()) as sandbox:
        if seccomp.CAPABILITY not in sandbox.capabilities:
            pytest.skip(f"this machine has no filter (capabilities: {sorted(sandbox.capabilities)})")
        yield sandbox


def call(box: LocalSandbox, number: int, *arguments: int, clone: bool = False) -> int:
    """Make one system call inside; returns 0 or the errno."""
    words = ", ".join(str(value) for value in (number, *arguments))
    argv = ["perl", "-e", f"my $r = syscall({words}); print $r == -1 ? $! + 0 : 0"]
    if clone:
        result = box.run_in_clone("t1_env.sandbox.probe:execute", {"argv": argv})
        assert result.error is None, result.error
        return int(result.payload["stdout"])
    result = box.run(argv)
    assert result.exit_code == 0, result
    return int(result.stdout)


@pytest.mark.namespaces
@pytest.mark.parametrize("name", sorted(seccomp.denied_calls(platform.machine())))
def test_a_denied_call_fails_inside(box: LocalSandbox, name: str) -> None:
    assert call(box, seccomp.denied_calls(platform.machine())[name], 0, 0, 0, 0, 0, 0) == errno.EPERM


@pytest.mark.namespaces
def test_examined_calls_fail_inside(box: LocalSandbox) -> None:
    machine = platform.machine()
    assert call(box, CLONE3, 0, 0) == errno.ENOSYS
    assert call(box, CLONE[machine], 0x10000000 | 17, 0, 0, 0, 0) == errno.EPERM
    assert call(box, SOCKET[machine], 40, 1, 0) == errno.EAFNOSUPPORT
    assert call(box, SOCKET[machine], 38, 5, 0) == errno.EAFNOSUPPORT
    assert call(box, IOCTL[machine], 0, 0x5412, 0) == errno.EPERM
    assert call(box, PERSONALITY[machine], 0x0400000) == errno.EPERM
    assert call(box, 500) == errno.ENOSYS
    assert call(box, (1 << 30) + READ[machine], 0, 0, 0) == errno.ENOSYS


@pytest.mark.namespaces
def test_the_filter_holds_in_clones_and_for_whatever_is_started(box: LocalSandbox) -> None:
    unshare = seccomp.denied_calls(platform.machine())["unshare"]
    assert call(box, unshare, 0x10000000, clone=True) == errno.EPERM
    status = box.run(["bash", "-c", "(setsid cat /proc/self/status) | grep -E '^(Seccomp|NoNewPrivs):'"]).stdout.split()
    assert status == [b"NoNewPrivs:", b"1", b"Seccomp:", b"2"]
    assert b"Seccomp:\t2" in box.run(["cat", "/proc/1/status"]).stdout


@pytest.mark.namespaces
def test_what_programs_live_on_works_inside(box: LocalSandbox) -> None:
    script = """
        use strict; use Socket;
        socketpair(my $a, my $b, AF_UNIX, SOCK_STREAM, 0) or die "socketpair: $!";
        socket(my $s, PF_INET, SOCK_STREAM, 0) or die "socket: $!";
        bind($s, sockaddr_in(0, INADDR_LOOPBACK)) or die "bind: $!";
        listen($s, 1) or die "listen: $!";
        defined(my $pid = fork) or die "fork: $!";
        exit 7 unless $pid;
        waitpid $pid, 0; print $? >> 8;
    """
    assert box.run(["perl", "-e", script]).stdout == b"7"
    assert box.run(["bash", "-c", "sleep 0 & wait; echo $(true | cat; echo piped)"]).stdout == b"piped\n"
    # A tracer inside: PTRACE_TRACEME.
    assert call(box, PTRACE[platform.machine()], 0, 0, 0, 0) == 0


@pytest.mark.namespaces
@pytest.mark.skipif(platform.machine() != "x86_64", reason="32-bit system calls of a 64-bit program exist on x86_64 only")
def test_the_32_bit_gate_is_closed(box: LocalSandbox) -> None:
    """``int 0x80`` in a 64-bit program: number 21 is mount there, and 20 (getpid) would do no harm."""
    code = bytes.fromhex(
        "b814000000"  # mov eax, 20
        "cd80"  # int 0x80
        "f7d8"  # neg eax
        "89c7"  # mov edi, eax
        "b83c000000"  # mov eax, 60 (exit)
        "0f05"  # syscall
    )
    address = 0x400000
    header = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, address + 120, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, address, address, 120 + len(code), 120 + len(code), 4096)
    box.put(header + segment + code, "/app/gate", mode=0o755)
    # A kernel without 32-bit support kills the program instead.
    assert box.run(["/app/gate"]).exit_code in (errno.ENOSYS, 128 + 11)
