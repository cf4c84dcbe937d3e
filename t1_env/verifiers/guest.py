"""Modules of the agent's in a process of their own, used from tests as if they were here.

A task that says ``imports = "apart"`` has what its tests import from the agent's files imported by another process (guest_process.py).
The tests get stand-ins: calls travel there with copies of their arguments and bring back copies of plain results. So no code of the agent's
runs where verdicts are taken, whatever it is; and a result is compared by its data, never by a method of the agent's.

What a test can do with such a module: import it in any way that goes through the import system, read and set attributes, call functions and
classes, iterate, index, use operators and ``with``, catch its exceptions, look at what it printed. What it cannot: hand it functions, await
it, subclass its classes, or have one of its objects equal to a plain value that it is not derived from.
"""

from __future__ import annotations

import builtins
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any, Final

from t1_env.verifiers import guest_process
from t1_env.verifiers import guest_values as values
from t1_env.verifiers.programs import working_directory

_MAX_CONTAINED: Final = 1_000_000
_HANDLE: Final = "_t1_handle"
_HERE: Final = ("__file__", "__spec__", "__loader__", "__path__", "__package__", "__name__", "__class__", "__dict__", "__getattr__")


class GuestDied(RuntimeError):
    """The process with the agent's modules ended, or answered with something that is no answer."""


class Guest:
    """The other process.

    Args:
        enter: Called in it first: gives up what it must not have.
        is_trusted: Whether a file is T1's or the task's; everything else is imported there.
    """

    def __init__(self, enter: Callable[[], None], is_trusted: Callable[[object], bool]) -> None:
        self.is_trusted = is_trusted
        self._connection, theirs = socket.socketpair()
        self._objects: dict[int, Any] = {}
        self._environ: dict[str, str] = {}
        self._owner = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.dup2(theirs.fileno(), 3)
                os.closerange(4, 1 << 16)
                enter()
                guest_process.serve(socket.socket(fileno=os.dup(3)))
            finally:
                os._exit(1)
        theirs.close()

    def ask(self, do: str, /, *args: Any, **named: Any) -> Any:
        """Have something done over there.

        Args:
            do: An operation of guest_process.
            args: Its arguments.
            named: More of them.

        Returns:
            What came of it.

        Raises:
            GuestDied: There is no answer.
            BaseException: Whatever was raised over there.
        """
        request: dict[str, Any] = {
            "do": do,
            "args": [self._encode(each) for each in args],
            "named": {name: self._encode(each) for name, each in named.items()},
            "cwd": working_directory(),
            "argv": [str(each) for each in sys.argv],
            "path": [entry for entry in sys.path if not self.is_trusted(f"{entry}/")],
        }
        if dict(os.environ) != self._environ:
            self._environ = dict(os.environ)
            request["environ"] = self._environ
        try:
            values.send(self._connection, request)
            answer = values.receive(self._connection)
            sys.stdout.write(str(answer["out"]))
            sys.stderr.write(str(answer["err"]))
            for mine, theirs in zip(args, answer["changed"], strict=False):
                if theirs is not None:
                    _update(mine, self._decode(theirs))
            if "error" not in answer:
                return self._decode(answer["value"])
            raised = self._exception(answer["error"])
        except (EOFError, OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as failure:
            raise GuestDied(f"the agent's module gave no answer: {failure or 'its process ended'}") from None
        raise raised

    def _encode(self, value: Any) -> Any:
        return values.encode(value, _number)

    def _decode(self, data: Any) -> Any:
        return values.decode(data, self._object)

    def _object(self, tag: str, inner: Any) -> Any:
        number = int(inner[0])
        if tag == "exception":
            return self._exception_class(inner[1])
        if tag == "derived":
            return _derived(self, number, self._decode(inner[1]))
        if tag != "handle":
            raise ValueError(f"unknown kind of value: {tag}")
        if number not in self._objects:
            self._objects[number] = GuestObject(self, number, str(inner[1]))
        return self._objects[number]

    def _exception_class(self, lineage: Sequence[Any]) -> type[BaseException]:
        *own, builtin = lineage
        found = getattr(builtins, str(builtin), None)
        kind: type[BaseException] = found if isinstance(found, type) and issubclass(found, BaseException) else Exception
        for number, name in reversed(own):
            known = self._objects.get(int(number))
            if not (isinstance(known, type) and issubclass(known, BaseException)):
                known = self._objects[int(number)] = type(str(name), (kind,), {_HANDLE: int(number)})
            kind = known
        return kind

    def _exception(self, error: Mapping[str, Any]) -> BaseException:
        kind = self._exception_class(error["lineage"])
        args = [self._decode(each) for each in error["args"]]
        try:
            return kind(*args)
        except Exception:  # noqa: BLE001 - some builtin ones take what their args do not say
            return RuntimeError(f"{kind.__name__}: {error['text']}")


def _number(value: Any) -> Any:
    """How a value that is not plain is written down for the other side, if it came from there."""
    number = getattr(value, _HANDLE, None)
    if not isinstance(number, int):
        raise TypeError(f"a {type(value).__name__} cannot be handed to a module that is kept apart")
    return {"handle": number}


def _update(mine: Any, theirs: Any) -> None:
    """Make an argument look as the other side left it."""
    if type(mine) is not type(theirs) or mine == theirs:
        return
    if isinstance(mine, list | bytearray):
        mine[:] = theirs
    else:
        mine.clear()
        mine.update(theirs)


class GuestObject:
    """Something that stayed over there."""

    def __init__(self, guest: Guest, number: int, kind: str) -> None:
        object.__setattr__(self, "_t1_guest", guest)
        object.__setattr__(self, _HANDLE, number)
        object.__setattr__(self, "_t1_kind", kind)

    def __getattr__(self, name: str) -> Any:
        return self._t1_guest.ask("builtin", "getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._t1_guest.ask("builtin", "setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._t1_guest.ask("builtin", "delattr", self, name)

    def __call__(self, /, *args: Any, **named: Any) -> Any:  # noqa: D102
        return self._t1_guest.ask("call", self, *args, **named)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        # Only two things of the agent's may say so themselves.
        return isinstance(other, GuestObject) and self._t1_guest.ask("operator", "eq", self, other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return id(self)

    def __contains__(self, item: object) -> bool:
        return any(item is each or item == each for each, _ in zip(self, range(_MAX_CONTAINED), strict=False))

    def __iter__(self) -> Iterator[Any]:
        iterator = self._t1_guest.ask("builtin", "iter", self)
        while True:
            try:
                item = self._t1_guest.ask("builtin", "next", iterator)
            except StopIteration:
                return
            yield item

    def __next__(self) -> Any:
        return self._t1_guest.ask("builtin", "next", self)

    def __len__(self) -> int:
        return int(self._t1_guest.ask("builtin", "len", self))

    def __bool__(self) -> bool:
        return self._t1_guest.ask("builtin", "bool", self) is True

    def __repr__(self) -> str:
        return str(self._t1_guest.ask("builtin", "repr", self))

    def __str__(self) -> str:
        return str(self._t1_guest.ask("builtin", "str", self))

    def __format__(self, spec: str) -> str:
        return str(self._t1_guest.ask("builtin", "format", self, spec))

    def __int__(self) -> int:
        return int(self._t1_guest.ask("builtin", "int", self))

    def __float__(self) -> float:
        return float(self._t1_guest.ask("builtin", "float", self))

    def __enter__(self) -> Any:
        return self._t1_guest.ask("enter", self)

    def __exit__(self, *_: object) -> bool:
        return self._t1_guest.ask("exit", self) is True

    def __instancecheck__(self, instance: object) -> bool:
        return hasattr(instance, _HANDLE) and self._t1_guest.ask("builtin", "isinstance", instance, self) is True

    def __subclasscheck__(self, kind: object) -> bool:
        return hasattr(kind, _HANDLE) and self._t1_guest.ask("builtin", "issubclass", kind, self) is True


def _forward(name: str) -> Callable[..., Any]:
    def forwarded(self: GuestObject, *operands: Any) -> Any:
        return self._t1_guest.ask("operator", name, self, *operands)

    return forwarded


def _forward_reversed(name: str) -> Callable[..., Any]:
    def forwarded(self: GuestObject, other: Any) -> Any:
        return self._t1_guest.ask("operator", name, other, self)

    return forwarded


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift", "matmul"):
    setattr(GuestObject, f"__{_name.rstrip('_')}__", _forward(_name))
    setattr(GuestObject, f"__r{_name.rstrip('_')}__", _forward_reversed(_name))
for _name in ("getitem", "setitem", "delitem", "neg", "pos", "invert", "abs", "index"):
    setattr(GuestObject, f"__{_name}__", _forward(_name))


def _derived(guest: Guest, number: int, data: Any) -> Any:
    """Data of an instance of a class derived from a plain type: compared as that data, everything else of it asked over there."""
    kind = type(data)
    if kind is bool or kind not in values.DERIVED_FROM:
        return data
    made: Any = _class_for(kind)(data)
    made._t1_guest = guest
    made._t1_handle = number
    return made


_classes: dict[type, type] = {}


def _class_for(kind: type) -> type:
    if kind not in _classes:
        _classes[kind] = type(f"Guest_{kind.__name__}", (kind,), {"__getattr__": _ask_for_attribute})
    return _classes[kind]


def _ask_for_attribute(self: Any, name: str) -> Any:
    if name.startswith("_t1_"):
        raise AttributeError(name)
    return self._t1_guest.ask("builtin", "getattr", self._t1_guest._objects.setdefault(self._t1_handle, _Bare(self)), name)


class _Bare:
    """A handle and nothing else, to ask for what belongs to it."""

    def __init__(self, of: Any) -> None:
        self._t1_handle: int = of._t1_handle


class GuestModule(ModuleType):
    """A module over there."""

    def __getattr__(self, name: str) -> Any:
        guest, handle = self.__dict__.get("_t1_guest"), self.__dict__.get(_HANDLE)
        if guest is None or handle is None or name in _HERE:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}", name=name, obj=self)
        return guest.ask("builtin", "getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HERE or name.startswith("_t1_") or isinstance(value, ModuleType):
            super().__setattr__(name, value)
        else:
            self.__dict__["_t1_guest"].ask("builtin", "setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self.__dict__["_t1_guest"].ask("builtin", "delattr", self, name)

    def __dir__(self) -> list[str]:
        return list(self.__dict__["_t1_guest"].ask("builtin", "dir", self))


class GuestFinder(Loader):
    """Finds what is not trusted and has it imported over there; a member of ``sys.meta_path``.

    Args:
        guest: Over there.
    """

    def __init__(self, guest: Guest) -> None:
        self._guest = guest

    def install(self) -> None:
        """From here on, have everything imported over there that is neither T1's nor the task's."""
        global _present
        _present = self._guest
        sys.meta_path.insert(sys.meta_path.index(PathFinder), self)

    def find_spec(self, name: str, path: Any = None, _target: Any = None) -> ModuleSpec | None:
        """The specification of a module that is not trusted; None for every other."""
        found = PathFinder.find_spec(name, path)
        if found is None:
            return None
        places = [found.origin] if found.origin is not None else [f"{place}/" for place in found.submodule_search_locations or ()]
        if all(map(self._guest.is_trusted, places)):
            return None
        specification = ModuleSpec(name, self, origin=found.origin, is_package=found.submodule_search_locations is not None)
        if found.submodule_search_locations is not None:
            specification.submodule_search_locations = list(found.submodule_search_locations)
        return specification

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """A stand-in that knows nothing yet."""
        return GuestModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Import it over there."""
        _stand_in(self._guest, module, self._guest.ask("import", module.__name__))


_present: Guest | None = None


def hook_loader() -> None:
    """Let source files that are loaded by their path be loaded over there too, once a `GuestFinder` is installed."""
    execute: Any = SourceFileLoader.exec_module

    def exec_module(loader: SourceFileLoader, module: ModuleType) -> None:
        if _present is None or _present.is_trusted(loader.path):
            execute(loader, module)
        else:
            _stand_in(_present, module, _present.ask("load", loader.name, loader.path))

    SourceFileLoader.exec_module = exec_module  # type: ignore[method-assign,assignment]


def _stand_in(guest: Guest, module: ModuleType, there: Any) -> None:
    """Make a module of this process stand for one over there."""
    module.__class__ = GuestModule
    module.__dict__["_t1_guest"] = guest
    module.__dict__[_HANDLE] = getattr(there, _HANDLE)
