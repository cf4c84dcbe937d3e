"""The process that the agent's modules are imported in, for tests that are kept apart from them: it does what the test's side asks.

It is forked before any test was read, sees a filesystem without the tests and holds no descriptor but its connection. What runs here may do
to it what it likes: it answers with data, and the tests judge that.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import importlib.util
import io
import operator
import os
import socket
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NoReturn

from t1_env.verifiers import guest_values as values


def serve(connection: socket.socket) -> NoReturn:
    """Answer until the other side is gone; never returns."""
    guest = _Guest()
    try:
        while True:
            request = values.receive(connection)
            values.send(connection, guest.answer(request))
    except (EOFError, OSError):
        os._exit(0)
    finally:
        os._exit(1)


class _Guest:
    """Objects that the test's side holds handles to."""

    def __init__(self) -> None:
        self._objects: dict[int, Any] = {}
        self._handles: dict[int, int] = {}

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Do what is asked, and say what came of it: a value or an exception, what was printed, arguments that were changed."""
        out, err = io.StringIO(), io.StringIO()
        passed: list[Any] = []
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                self._follow(request)
                passed = [self._decode(each) for each in request.get("args", ())]
                named = {name: self._decode(each) for name, each in request.get("named", {}).items()}
                operation: Callable[..., Any] = getattr(self, f"_do_{request['do']}")
                answer: dict[str, Any] = {"value": self._encode(operation(*passed, **named))}
            except BaseException as error:  # noqa: BLE001 - SystemExit as well is what the test would have seen
                answer = {"error": self._exception(error)}
        changed = [self._encode(each) if type(each) in (list, dict, set, bytearray) else None for each in passed]
        return {**answer, "out": out.getvalue(), "err": err.getvalue(), "changed": changed}

    def _follow(self, request: Mapping[str, Any]) -> None:
        """Be where the test's side is: directory, variables, arguments, import path."""
        with contextlib.suppress(OSError):
            os.chdir(request["cwd"])
        if "environ" in request:
            os.environ.clear()
            os.environ.update(request["environ"])
        sys.argv = list(request["argv"])
        sys.path[:] = [*request["path"], *(entry for entry in sys.path if entry not in request["path"])]

    # -------------------------------------------------------------------------------------------------------------------- operations
    def _do_import(self, name: str) -> ModuleType:
        sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    def _do_load(self, name: str, path: str) -> ModuleType:
        specification = importlib.util.spec_from_file_location(name, path)
        if specification is None or specification.loader is None:
            raise ImportError(f"cannot load {path}", name=name, path=path)
        module = importlib.util.module_from_spec(specification)
        sys.modules[name] = module
        specification.loader.exec_module(module)
        return module

    def _do_operator(self, name: str, *operands: Any) -> Any:
        return getattr(operator, name)(*operands)

    def _do_builtin(self, name: str, /, *operands: Any, **named: Any) -> Any:
        return getattr(builtins, name)(*operands, **named)

    def _do_call(self, function: Any, /, *args: Any, **named: Any) -> Any:
        return function(*args, **named)

    def _do_enter(self, manager: Any) -> Any:
        return manager.__enter__()

    def _do_exit(self, manager: Any) -> Any:
        return manager.__exit__(None, None, None)

    # ------------------------------------------------------------------------------------------------------------------------ values
    def _decode(self, data: Any) -> Any:
        return values.decode(data, lambda tag, inner: self._objects[int(inner)])

    def _encode(self, value: Any) -> Any:
        return values.encode(value, self._handle)

    def _handle(self, value: Any) -> Any:
        number = self._handles.get(id(value))
        if number is None:
            number = len(self._objects) + 1
            self._objects[number] = value  # for good: a number means one object for ever
            self._handles[id(value)] = number
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"exception": [number, self._lineage(value)]}
        base: Any
        for base in values.DERIVED_FROM:
            if isinstance(value, base) and type(value) is not base:
                return {"derived": [number, self._encode(base(value))]}
        return {"handle": [number, type(value).__name__]}

    def _lineage(self, kind: type) -> list[Any]:
        """Names of an exception class and its bases, down to a builtin one; a number for each of the agent's."""
        found: list[Any] = []
        for base in kind.__mro__:
            if base.__module__ == "builtins":
                found.append(base.__name__)
                break
            self._handles.setdefault(id(base), len(self._objects) + 1)
            self._objects.setdefault(self._handles[id(base)], base)
            found.append([self._handles[id(base)], base.__name__])
        return found

    def _exception(self, error: BaseException) -> dict[str, Any]:
        arguments = []
        for each in error.args:
            try:
                arguments.append(self._encode(each))
            except ValueError:
                arguments.append(repr(each))
        return {"lineage": self._lineage(type(error)), "args": arguments, "text": str(error)}
