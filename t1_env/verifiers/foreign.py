"""Noticing that code which is not T1's or the task's is about to run in this process.

The interpreter raises an audit event before it executes a code object, loads a shared library or lets a pickle name a function, and no
Python code can take an audit hook away. As long as nothing foreign has run, everything such a hook looks at is what it seems: so the first
foreign code is noticed for certain, before its first instruction. What is not recognised counts as foreign; a test that executes a string
of its own is taken for one that executes the agent's.

After that moment nothing in the process is certain any more. `suspicion` says what foreign code was caught at; that it was caught at
nothing proves nothing.
"""

from __future__ import annotations

import importlib._bootstrap
import importlib._bootstrap_external
import sys
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, Final

Notice = Callable[[str], None]

# Libraries that compile what they were told by the program itself: fields of a dataclass, a mark's condition.
_GENERATORS: Final = frozenset(
    {"attr._make", "collections", "dataclasses", "enum", "typing", "_pytest.skipping", "_pytest.mark.expression"}
)
_BOOTSTRAP: Final[Any] = importlib._bootstrap
_EXTERNAL: Final[Any] = importlib._bootstrap_external
_CALL: Final[CodeType] = _BOOTSTRAP._call_with_frames_removed.__code__
_EXECUTE: Final[CodeType] = _EXTERNAL._LoaderBasics.exec_module.__code__
_EXECUTE_FROZEN: Final[CodeType] = _BOOTSTRAP.FrozenImporter.exec_module.__code__
_UNMARSHAL: Final[CodeType] = _EXTERNAL._compile_bytecode.__code__

_TRICKS: Final = frozenset(
    {
        *("code.__new__", "ctypes.addressof", "ctypes.cdata", "ctypes.cdata/buffer", "ctypes.string_at", "gc.get_objects"),
        *("gc.get_referents", "gc.get_referrers", "object.__delattr__", "object.__setattr__", "sys._current_frames"),
        *("sys._current_exceptions", "sys._getframe", "sys.addaudithook", "sys.setprofile", "sys.settrace"),
    }
)
# Attributes whose assignment is audited because it changes what a function or class does.
_INNARDS: Final = frozenset({"__code__", "__defaults__", "__kwdefaults__", "__globals__", "__closure__", "__bases__", "__class__"})
_GO_BETWEENS: Final = frozenset({"inspect", "traceback"})


class Watch:
    """What an audit hook of this process looks for.

    Args:
        roots: Directories that only trusted files are in: T1's library and the task's tests. No other code is trusted.
        loaders: Types of loader, beside Python's own, that read a trusted file.
        notice: Called with a reason before the first foreign code runs. It may end the process.
        suspicion: Called with a reason whenever foreign code is caught at a trick afterwards.
    """

    def __init__(self, roots: Sequence[str], loaders: Sequence[type], notice: Notice, suspicion: Notice) -> None:
        self.roots = tuple(f"{root.rstrip('/')}/" for root in roots if root.startswith("/") and root != "/")
        self.loaders = (_EXTERNAL.SourceFileLoader, _EXTERNAL.SourcelessFileLoader, _EXTERNAL.ExtensionFileLoader, *loaders)
        self.notice = notice
        self.suspicion = suspicion

    def start(self) -> None:
        """Watch this process until it ends."""
        sys.addaudithook(_hook(self))

    def is_trusted(self, path: object) -> bool:
        """Whether a file can only be T1's or the task's."""
        return type(path) is str and path.startswith(self.roots) and "/../" not in path

    def trusted_modules(self, before: Mapping[str, Any]) -> dict[int, str]:
        """Identity of the namespace of every trusted module -> its name: those that were there before, and those from trusted files."""
        found = {id(module.__dict__): name for name, module in before.items() if hasattr(module, "__dict__")}
        for name, module in sys.modules.copy().items():
            if self.is_trusted(getattr(module, "__file__", None)):
                found[id(module.__dict__)] = name
        return found

    def foreign(self, event: str, arguments: tuple[Any, ...], caller: FrameType) -> str | None:
        """Why what is about to happen runs foreign code; None if it does not. Only for a process in which none has run."""
        if event == "exec":
            return self._foreign_code(arguments[0], caller)
        if event == "import":
            path = arguments[1]  # of a shared library; None for everything else
            return None if path is None or self.is_trusted(path) else f"loads {path}"
        if event == "ctypes.dlopen":
            return None if arguments[0] is None or self.is_trusted(arguments[0]) else f"loads {arguments[0]}"
        if event in ("marshal.load", "marshal.loads"):
            return None if caller.f_code is _UNMARSHAL else "reads marshalled code"
        return f"{event}: {arguments[0] if arguments else ''}"

    def _foreign_code(self, code: Any, caller: FrameType) -> str | None:
        name = getattr(code, "co_filename", "?")
        if caller.f_code is _CALL and caller.f_back is not None:
            executor = caller.f_back
            if executor.f_code is _EXECUTE_FROZEN:
                return None
            if executor.f_code is _EXECUTE:
                loader: Any = executor.f_locals.get("self")
                return None if type(loader) in self.loaders and self.is_trusted(loader.path) else f"imports {name}"
        module = caller.f_globals.get("__name__")
        if module in _GENERATORS and getattr(sys.modules.get(module), "__dict__", None) is caller.f_globals:
            return None
        return f"executes {name}"


_WATCHED: Final = frozenset(
    {"exec", "import", "ctypes.dlopen", "marshal.load", "marshal.loads", "code.__new__", "pickle.find_class", "sqlite3.load_extension"}
)


def _hook(watch: Watch) -> Callable[[str, tuple[Any, ...]], None]:
    """The hook itself. All it needs is in its cells: it asks nothing of a module that foreign code could change."""
    foreign, notice, suspicion, is_trusted = watch.foreign, watch.notice, watch.suspicion, watch.is_trusted
    watched, tricks, innards, go_betweens = _WATCHED, _TRICKS, _INNARDS, _GO_BETWEENS
    frame_of, kind, text, before = sys._getframe, type, str, sys.modules.copy()
    trusted_globals: Mapping[int, str] | None = None
    busy = False

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal trusted_globals, busy
        if trusted_globals is None:
            if event not in watched:
                return
            why = foreign(event, arguments, frame_of(1))
            if why is not None:
                trusted_globals = watch.trusted_modules(before)
                notice(why)
            return
        if busy or not (event in tricks or event == "open"):
            return
        busy = True
        try:
            caller: FrameType | None = frame_of(1)
            while caller is not None and trusted_globals.get(id(caller.f_globals)) in go_betweens:
                caller = caller.f_back
            if caller is None or id(caller.f_globals) in trusted_globals:
                return
            if event == "open":
                path = arguments[0]
                if kind(path) is text and (path.endswith("/mem") or path.startswith("/proc/self/fd/")) and path.startswith("/proc/"):
                    suspicion(f"opens {path}")
                elif is_trusted(path):
                    suspicion(f"reads {path}")
            elif not (event in ("object.__setattr__", "object.__delattr__") and arguments[1] not in innards):
                suspicion(event)
        finally:
            busy = False

    return hook
