"""Is what judges a test still what it was? A comparison of everything callable that was loaded before foreign code ran.

Foreign code that runs in the process of a test can replace what the test looks with: a builtin, a method of ``pathlib.Path``, a hook of
pytest, a function of the test's own module. A change that is still there when the test has ended is found here. One that undid itself in
time is not, which is why a pass that was taken beside foreign code is marked even if nothing is found.
"""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

import pytest

_HEAP_TYPE: Final = 1 << 9
_IMMUTABLE_TYPE: Final = 1 << 8
_MISSING: Final = object()
# Names that libraries set anew as they go.
_VOLATILE: Final = frozenset({"__warningregistry__", "last_traceback", "last_type", "last_value", "last_exc", "stdin", "stdout", "stderr"})
_LISTS: Final = ("meta_path", "path_hooks")
_HOOKS: Final = ("excepthook", "unraisablehook", "displayhook", "breakpointhook")


@dataclass(slots=True)
class _Seen:
    """One name of one module or class, and what makes up what it stood for."""

    owner: str
    names: Mapping[str, Any]
    name: str
    value: Any
    inside: tuple[Any, ...]


@dataclass(slots=True)
class Pristine:
    """The state before foreign code. Made in a process that has run none, and inherited by forks.

    Args:
        seen: What was there.
        modules: Modules that are in it.
        types: Identities of the classes that were there.
    """

    seen: list[_Seen] = field(default_factory=list)
    modules: set[int] = field(default_factory=set)
    types: set[int] = field(default_factory=set)
    process: tuple[Any, ...] = ()
    plugins: tuple[Any, ...] = ()

    def add(self, session: pytest.Session | None = None, *, only: Callable[[ModuleType], bool] = lambda _: True) -> None:
        """Take in every module that is not in it yet, and the present state of the process.

        Args:
            session: The session whose plugins are to be as they are.
            only: Which modules to look at.
        """
        for name, module in sys.modules.copy().items():
            if type(module) is ModuleType and id(module) not in self.modules and only(module):
                self.modules.add(id(module))
                self._add_names(name, module.__dict__)
        self.process = _process_state()
        self.plugins = () if session is None else _plugin_state(session)

    def _add_names(self, owner: str, names: Mapping[str, Any]) -> None:
        for name, value in list(names.items()):
            if name in _VOLATILE:
                continue
            if isinstance(value, type):
                self.seen.append(_Seen(owner, names, name, value, ()))
                self._add_type(value)
            elif callable(value) or isinstance(value, _WRAPPED):
                self.seen.append(_Seen(owner, names, name, value, _inside(value)))

    def _add_type(self, kind: type) -> None:
        if id(kind) in self.types:
            return
        self.types.add(id(kind))
        if kind.__flags__ & (_HEAP_TYPE | _IMMUTABLE_TYPE) == _HEAP_TYPE:
            self._add_names(kind.__qualname__, kind.__dict__)

    def changes(self, session: pytest.Session | None = None) -> Iterator[str]:
        """What is no longer as it was, in words."""
        for each in self.seen:
            value = each.names.get(each.name, _MISSING)
            if value is not each.value or (each.inside and _inside(value) != each.inside):
                yield f"{each.owner}.{each.name} was replaced"
        if _process_state() != self.process:
            yield "hooks of the interpreter were changed"
        if session is not None and self.plugins and _plugin_state(session) != self.plugins:
            yield "plugins of pytest were changed"

    def knows(self, kind: type) -> bool:
        """Whether a class was there before foreign code."""
        return id(kind) in self.types or kind.__flags__ & _HEAP_TYPE == 0


_WRAPPED: Final = (ModuleType, staticmethod, classmethod, property)


def _inside(value: Any) -> tuple[Any, ...]:
    """What a function consists of, as far as it can be changed without its being another function."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, property):
        return tuple(part for getter in (value.fget, value.fset) if getter is not None for part in _inside(getter))
    if type(value) is not FunctionType:
        return ()
    return (id(value.__code__), id(value.__defaults__), id(value.__kwdefaults__))


def _process_state() -> tuple[Any, ...]:
    handlers = tuple(signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD))
    lists = tuple(tuple(map(id, getattr(sys, name))) for name in _LISTS)
    hooks = tuple(id(getattr(sys, name)) for name in _HOOKS)
    return (handlers, lists, hooks, sys.gettrace(), sys.getprofile(), len(gc.callbacks), id(threading.excepthook))


def _plugin_state(session: pytest.Session) -> tuple[Any, ...]:
    manager = session.config.pluginmanager
    hooks = tuple(
        (name, tuple(id(implementation.function) for implementation in caller.get_hookimpls()))
        for name, caller in sorted(vars(session.config.hook).items())
        if hasattr(caller, "get_hookimpls")
    )
    return (tuple(sorted(id(plugin) for plugin in manager.get_plugins() if not isinstance(plugin, ModuleType))), hooks)


def replaced_tests(module: ModuleType, code: CodeType, own: Iterable[str]) -> Iterator[str]:
    """Functions of a test file that are not what the file says.

    Args:
        module: The imported file.
        code: What was executed to import it.
        own: Names that it defines with ``def`` or ``class`` at its top.
    """
    original = {id(each) for each in _codes(code)}
    for name in own:
        value = module.__dict__.get(name, _MISSING)
        for where, function in _functions(name, value):
            if id(function.__code__) not in original:
                yield f"{where} of {module.__name__} was replaced"
        if value is _MISSING:
            yield f"{name} of {module.__name__} was removed"


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _functions(name: str, value: Any) -> Iterator[tuple[str, FunctionType]]:
    if isinstance(value, FunctionType):
        while hasattr(value, "__wrapped__"):
            value = value.__wrapped__
        if isinstance(value, FunctionType):
            yield name, value
    elif isinstance(value, type):
        for inner, member in list(vars(value).items()):
            member = member.__func__ if isinstance(member, staticmethod | classmethod) else member
            if isinstance(member, FunctionType) and not (inner.startswith("__") and inner.endswith("__")):
                yield f"{name}.{inner}", member
