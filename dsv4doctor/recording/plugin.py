"""The entry point of the SGLang plugin (group `sglang.srt.plugins`).

SGLang calls `register` early in each of its processes.  Without DSV4DOCTOR_RECORD that is all that
happens.  With it nothing is imported that the process would not import by itself: modules are
watched for, and the classes in them wrapped once they are there.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

VARIABLE = "DSV4DOCTOR_RECORD"
_complained: list[str] = []


def register() -> None:
    """Start recording when DSV4DOCTOR_RECORD names a file; never raises."""
    file = os.environ.get(VARIABLE)
    if file:
        guarded(_install, file)


def guarded(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, or None and one line in the log for this process."""
    try:
        return function(*args)
    except Exception as error:
        complain(error)
        return None


def complain(error: Exception) -> None:
    """Say once that recording does not work; the server goes on."""
    if not _complained:
        _complained.append(repr(error))
        logging.getLogger("dsv4doctor").warning(
            "dsv4doctor: recording stopped (%s: %s); the server is not affected",
            type(error).__name__,
            error,
        )


def stopped() -> bool:
    """True after a fault of ours."""
    return bool(_complained)


def _install(file: str) -> None:
    from dsv4doctor.recording.hooks import Hooks

    hooks = Hooks(file)
    when_imported(
        {
            "sglang.srt.layers.moe.utils": hooks.contexts,
            "sglang.srt.layers.moe.fused_moe_triton.layer": hooks.layers,
            "sglang.srt.model_executor.model_runner": hooks.runner,
        }
    )


def when_imported(actions: dict[str, Callable[[ModuleType], None]]) -> None:
    """Call an action with its module: now if it is there, else when it has been imported."""
    waiting = {}
    for name, action in actions.items():
        if name in sys.modules:
            guarded(action, sys.modules[name])
        else:
            waiting[name] = action
    if waiting:
        sys.meta_path.insert(0, _Watch(waiting))


class _Watch(importlib.abc.MetaPathFinder):
    """Lets the other finders find a module, and has it looked at after it ran."""

    def __init__(self, waiting: dict[str, Callable[[ModuleType], None]]) -> None:
        self.waiting = waiting

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        action = self.waiting.pop(name, None)
        if action is None:
            return None
        found: importlib.machinery.ModuleSpec | None = guarded(self._find, name, path, target)
        if found is not None and found.loader is not None:
            found.loader = _Loader(found.loader, action)
        return found

    def _find(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> importlib.machinery.ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                found = finder.find_spec(name, path, target)
                if found is not None:
                    return found
        return None


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, action: Callable[[ModuleType], None]) -> None:
        self.loader = loader
        self.action = action

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self.loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        guarded(self.action, module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)
