"""The keeper: one small process per sandbox, outside it, that owns its mounts, its cgroup and its verification clones.

Forked from the zygote, so it starts with a warm interpreter. It serves one request at a time over its socket to the host process and
ends, taking the sandbox with it, when that socket closes, however the host process ended.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from t1_env.sandbox import (
    accounts,
    archives,
    clone,
    clone_call,
    clone_root,
    files,
    limits,
    masking,
    namespaces,
    rootfs,
    seccomp,
    stacking,
    syscalls,
    wire,
)
from t1_env.sandbox.base import CloneView
from t1_env.sandbox.init import InitConfig, run_init

BASE_ENV: Final[Mapping[str, str]] = {
    "DEBIAN_FRONTEND": "noninteractive",
    "GIT_PAGER": "cat",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "LOGNAME": "root",
    "PAGER": "cat",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "SHELL": "/bin/bash",
    "TERM": "xterm-256color",
    "TZ": "UTC",
    "USER": "root",
}
"""The environment inside; nothing of the host's is inherited."""


@dataclass(frozen=True, slots=True)
class KeeperConfig:
    """What the zygote hands to a keeper.

    Args:
        name: Unique name, used for cgroup directories.
        spec: Fields of ``SandboxSpec`` as JSON.
        template: The zygote's mounts.
        interpreter: Host directories that a clone's interpreter needs.
        privileged: Whether the host process is root, so that all of its users exist inside.
        lender: Where the keeper of the sandbox to be copied hands over its files, for a fork.
    """

    name: str
    spec: Mapping[str, Any]
    template: rootfs.Template
    interpreter: clone.Interpreter
    privileged: bool
    lender: socket.socket | None = None

    @property
    def stack(self) -> stacking.Stack:
        """What the sandbox's root starts from."""
        return stacking.Stack.from_json(self.spec["root"])

    @property
    def limits(self) -> limits.Limits:
        """The bounds of the specification."""
        spec = self.spec
        return limits.Limits(
            memory_mb=spec["memory_mb"], storage_mb=spec["storage_mb"], max_processes=spec["max_processes"], cpus=spec["cpus"]
        )

    @property
    def env(self) -> dict[str, str]:
        """The complete environment of a process inside."""
        return {**BASE_ENV, "HOSTNAME": self.spec["hostname"], **self.spec["env"]}


class Keeper:
    """One sandbox, seen from just outside it; the caller is in the sandbox's own user and mount namespaces."""

    def __init__(self, sock: socket.socket, config: KeeperConfig) -> None:
        self._sock = sock
        self._config = config
        self._cgroup = limits.Cgroup()
        self._clone_cgroup = limits.Cgroup()
        self._in_clone_cgroup = False
        self._init_pid = 0
        self._init_sock: socket.socket | None = None
        self._root_fd = -1
        self._network_fd = -1

    def start(self) -> None:
        """Assemble the root, start pid 1 and report to the host.

        Raises:
            OSError: A mount or a namespace was refused.
        """
        config = self._config
        syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
        self._cgroup = limits.create_cgroup(config.name, config.limits)
        if self._cgroup.directories:
            self._clone_cgroup = limits.create_cgroup(f"{config.name}-clone", config.limits, freezer=False)
        warmer = limits.warm_up(self._cgroup)
        self._build_root()
        self._root_fd = os.open(config.template.root, os.O_PATH | os.O_DIRECTORY)
        host_end, init_host = socket.socketpair()
        self._init_sock, init_keeper = socket.socketpair()
        report_read, report_write = os.pipe()
        self._init_pid = namespaces.fork_pid_1(lambda: self._become_init([init_host, init_keeper], report_write), tied=False)
        for end in (init_host, init_keeper):
            end.close()
        os.close(report_write)
        with os.fdopen(report_read, "rb") as stream:
            report = stream.read()
        verdict, _, gained = report.partition(b" ")
        if verdict != b"ok":
            code, _, text = report.decode("utf-8", "replace").partition(" ")
            raise OSError(int(code or 0), text or "pid 1 ended at once", "pid 1 of the sandbox")
        (self._network_fd,) = wire.receive(self._init_sock)[1]
        capabilities = {
            "clone",
            "fork",
            "freeze",
            "storage_limit",
            "network_off",
            "views",
            "live",
            *self._cgroup.capabilities,
            *gained.decode().split(),
        }
        if self._is_bounded(self._cgroup):
            capabilities.add(limits.PROCESSES)
        if seccomp.available():
            capabilities.add(seccomp.CAPABILITY)
        pidfd = os.pidfd_open(os.getpid())
        wire.send(self._sock, {"capabilities": sorted(capabilities)}, [host_end.fileno(), pidfd])
        host_end.close()
        os.close(pidfd)
        if warmer:
            os.waitpid(warmer, 0)
        if self._clone_cgroup.directories:
            # The keeper itself, now that it is cheap: clones inherit it.
            limits.join(self._clone_cgroup.procs_fds)
            self._in_clone_cgroup = True

    def _is_bounded(self, cgroup: limits.Cgroup) -> bool:
        """Whether the number of processes is bounded: by a cgroup, or by RLIMIT_NPROC, which holds for everybody but root."""
        return limits.PROCESSES in cgroup.capabilities or not self._config.privileged

    def _build_root(self) -> None:
        config, spec = self._config, self._config.spec
        for path in config.stack.locks:
            # Held until this process ends, and so exactly as long as the sandbox lives.
            fcntl.flock(os.open(path, os.O_RDONLY | os.O_CLOEXEC), fcntl.LOCK_SH)
        copy_of = None if config.lender is None else stacking.borrow(config.lender)
        stacking.build_root(
            config.template,
            config.stack,
            storage_mb=spec["storage_mb"],
            workdir=spec["workdir"],
            hostname=spec["hostname"],
            hide=spec["hide"],
            copy_of=copy_of,
        )
        if config.lender is not None and copy_of is not None:
            os.close(copy_of)
            stacking.give_back(config.lender)

    def serve(self) -> None:
        """Answer requests until the host is gone."""
        handlers: Mapping[str, Callable[[wire.Message, list[int]], tuple[wire.Message, list[int]]]] = {
            "put": self._put,
            "put_tree": self._put_tree,
            "mkdir": self._mkdir,
            "get": self._get,
            "generation": self._generation,
            "system_changes": self._system_changes,
            "clone": self._clone,
            "lend": self._lend,
            "export": self._export,
            "unpack": self._unpack,
            "account": self._account,
        }
        while True:
            request, fds = wire.receive(self._sock)
            passed: list[int] = []
            try:
                reply, passed = handlers[request["op"]](request, fds)
            except OSError as error:
                reply = {"error": error.strerror or str(error), "errno": error.errno, "path": error.filename}
            finally:
                wire.close_all(fds)
            wire.send(self._sock, reply, passed)
            wire.close_all(passed)

    def shut_down(self) -> None:
        """Kill everything inside and remove the cgroups; the mounts go with the process."""
        if self._init_pid:
            namespaces.kill_and_reap(self._init_pid)
        if self._in_clone_cgroup:
            self._clone_cgroup.leave()
        self._clone_cgroup.remove()
        self._cgroup.remove()

    # ------------------------------------------------------------------------------------------------------------------- pid 1
    def _become_init(self, socks: list[socket.socket], report_fd: int) -> NoReturn:
        spec, procs_fds = self._config.spec, self._cgroup.procs_fds
        freezer = self._cgroup.freezer
        thaw_fd = None if freezer is None else os.open(freezer, os.O_WRONLY | os.O_CLOEXEC)
        kept = [*(sock.fileno() for sock in socks), report_fd, *procs_fds]
        syscalls.close_all_except(kept if thaw_fd is None else [*kept, thaw_fd])
        root = self._config.template.root
        report = b"ok"
        try:
            syscalls.set_process_name("t1-init")
            syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
            # Nobody can open it any more once the privileges are gone.
            network_fd = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            if not self._is_bounded(self._cgroup) and limits.bound_pid_namespace(self._config.limits.max_processes):
                report = f"ok {limits.PROCESSES}".encode()
            rootfs.mount_kernel_filesystems(root)
            rootfs.seal_dev(root)
            syscalls.enter_root(root)
            syscalls.set_hostname(spec["hostname"])
            syscalls.bring_loopback_up()
            syscalls.drop_privileges()
            if seccomp.available():
                seccomp.install()
        except OSError as error:
            os.write(report_fd, f"{error.errno or 0} {error.strerror}: {error.filename}".encode())
            os._exit(1)
        wire.send(socks[1], {}, [network_fd])
        os.close(network_fd)
        os.write(report_fd, report)
        os.close(report_fd)
        config = InitConfig(
            env=self._config.env,
            workdir=spec["workdir"],
            limits=self._config.limits,
            memory_is_bounded=limits.MEMORY in self._cgroup.capabilities,
            procs_fds=procs_fds,
            thaw_fd=thaw_fd,
            thaw_word=self._cgroup.thaw_word.encode(),
        )
        run_init(socks, config)

    # ---------------------------------------------------------------------------------------------------------------- requests
    def _put(self, request: wire.Message, fds: list[int]) -> tuple[wire.Message, list[int]]:
        mode = request["mode"]
        if mode is None:
            mode = stat.S_IMODE(os.fstat(fds[0]).st_mode)
        times = request["times_ns"]
        times_ns = None if times is None else (times[0], times[1])
        files.write_file(self._root_fd, request["dest"], fds[0], mode, times_ns, owner=_owner(request))
        return {}, []

    def _put_tree(self, request: wire.Message, _: list[int]) -> tuple[wire.Message, list[int]]:
        left_out = frozenset(request.get("left_out", ()))
        files.write_tree(
            self._root_fd, request["dest"], request["source"], owner=_owner(request), left_out=left_out, mode=request.get("mode")
        )
        return {}, []

    def _mkdir(self, request: wire.Message, _: list[int]) -> tuple[wire.Message, list[int]]:
        files.make_directories(self._root_fd, request["dest"], owner=_owner(request))
        return {}, []

    def _get(self, request: wire.Message, _: list[int]) -> tuple[wire.Message, list[int]]:
        return {}, [files.open_for_reading(self._root_fd, request["path"])]

    def _generation(self, _: wire.Message, __: list[int]) -> tuple[wire.Message, list[int]]:
        return {"generation": files.fingerprint((f"{self._config.template.store}/up",))}, []

    def _system_changes(self, _: wire.Message, __: list[int]) -> tuple[wire.Message, list[int]]:
        return {"files": clone_root.system_changes(self._config.template, self._config.stack)}, []

    def _lend(self, _: wire.Message, fds: list[int]) -> tuple[wire.Message, list[int]]:
        """Let the keeper of a fork copy what was written here, while nothing moves."""
        with self._frozen(), socket.socket(fileno=os.dup(fds[0])) as borrower:
            stacking.lend(borrower, f"{self._config.template.store}/up", self._sock)
        return {}, []

    def _export(self, request: wire.Message, _: list[int]) -> tuple[wire.Message, list[int]]:
        with self._frozen():
            parts, copied = stacking.export_writes(self._config.template, self._config.stack, request["target"])
        return {"parts": parts, "entries": copied.entries, "size_bytes": copied.size_bytes, "skipped": copied.skipped}, []

    def _unpack(self, request: wire.Message, fds: list[int]) -> tuple[wire.Message, list[int]]:
        with open(fds[0], "rb", closefd=False) as stream:
            unpacked = archives.unpack(
                stream, self._root_fd, request["dest"], owners=self._config.privileged, closed=("/dev", "/proc", "/sys")
            )
        return {"entries": unpacked.entries}, []

    def _account(self, request: wire.Message, _: list[int]) -> tuple[wire.Message, list[int]]:
        account = accounts.resolve(self._root_fd, request["user"])
        if account.uid != 0 and not self._config.privileged:
            raise OSError(errno.EPERM, f"a sandbox that an ordinary user starts has no users but root, not {request['user']!r}")
        return {"account": account.to_json()}, []

    # ------------------------------------------------------------------------------------------------------------------- clone
    def _clone(self, request: wire.Message, _: list[int]) -> tuple[wire.Message, list[int]]:
        try:
            clone.resolve_entry(request["entry"])
        except Exception as error:  # noqa: BLE001  (importing may raise anything; it is reported to the caller as the clone's error)
            return {"seconds": 0.0, "result": None, "error": f"{request['entry']}: {type(error).__name__}: {error}"}, []
        view = None if request.get("view") is None else masking.view_from_json(request["view"])
        started = time.monotonic()
        deadline = started + request["timeout_s"]
        masks = None
        try:
            with self._frozen() as thaw:
                if view is not None:
                    masks = self._find_masks(view)
                order = self._order(request, view, masks)
                result, reason = clone_call.call(order, self._config.template, self._config.interpreter, self._sock, deadline, thaw)
        except OSError as failure:
            result, reason = None, f"the clone could not be made: {failure}"
        masked = [] if masks is None else masks.names
        return {"seconds": time.monotonic() - started, "result": result, "error": reason, "masked": masked}, []

    def _find_masks(self, view: CloneView) -> masking.Masks:
        template, stack = self._config.template, self._config.stack
        return masking.find_masks(clone_root.system_parts(template, stack), view, clone_root.links_of(template, stack))

    def _order(self, request: wire.Message, view: CloneView | None, masks: masking.Masks | None) -> clone.CloneRequest:
        config, spec = self._config, self._config.spec
        live = view is not None and view.live
        return clone.CloneRequest(
            entry=request["entry"],
            payload=request["payload"],
            mounts=request["mounts"],
            env=config.env,
            workdir=spec["workdir"],
            hostname=spec["hostname"],
            stack=config.stack,
            limits=config.limits,
            memory_is_bounded=limits.MEMORY in self._clone_cgroup.capabilities,
            processes_are_bounded=self._is_bounded(self._clone_cgroup),
            masks=masks,
            restored=view is not None and view.restored,
            network_fd=self._network_fd if live else -1,
        )

    @contextlib.contextmanager
    def _frozen(self) -> Iterator[Callable[[], None]]:
        """The agent's processes stand still inside the block, or until what it is given is called."""
        with contextlib.ExitStack() as stack:
            if self._cgroup.freezer is not None:
                self._cgroup.freeze()
                stack.callback(self._cgroup.thaw)
            else:
                self._ask_init("stop")
                stack.callback(self._ask_init, "continue")
            yield stack.close

    def _ask_init(self, operation: str) -> None:
        assert self._init_sock is not None
        wire.send(self._init_sock, {"op": operation})
        reply, _ = wire.receive(self._init_sock)
        if "error" in reply:
            raise OSError(reply.get("errno") or 0, f"pid 1: {reply['error']}")


def _owner(request: wire.Message) -> tuple[int, int] | None:
    owner = request.get("owner")
    return None if owner is None else (owner[0], owner[1])
