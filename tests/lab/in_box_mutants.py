"""Mutants: how the package would be wrong on a shared home. A call of a box patches one into its own process.

There is none for a missing fsync(2): an unlock flushes to the server too, so that only a server's power loss shows it.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

from sotbus.comm import holder, inbox, registry, registry_lock
from sotbus.comm.inbox import Inbox
from sotbus.comm.lock_manager import FlockManager
from sotbus.comm.registry_lock import RegistryLock

_append = Inbox.append


def _append_with_an_early_open(self: Inbox, line: bytes, bound_s: float) -> None:
    fd = os.open(self.path, inbox.APPEND_FLAGS, 0o600)

    def opened(path: str, flags: int, mode: int = 0o777) -> int:
        return fd if path == self.path else os.open(path, flags, mode)

    early = types.ModuleType("os")
    vars(early).update(vars(os), open=opened)
    with patch.object(inbox, "os", early):
        _append(self, line, bound_s)


def open_before_lock() -> None:
    """The inbox is opened before its lock is taken, and not fenced: the fence alone would make the descriptor fresh."""
    patch.object(Inbox, "append", _append_with_an_early_open).start()
    patch.object(FlockManager, "fence", lambda *_: False).start()


def no_inbox_lock() -> None:
    """Neither the lock file's lock nor the fence."""
    patch.object(FlockManager, "hold", lambda *_: nullcontext()).start()
    patch.object(FlockManager, "fence", lambda *_: False).start()


def no_registry_lock() -> None:
    patch.object(RegistryLock, "hold", lambda *_: nullcontext()).start()


def no_folder_open() -> None:
    """No folder is opened before a read that must be fresh."""
    for module in [module for name, module in sys.modules.items() if name.startswith("sotbus")]:
        for name in {"touch_folder", "refresh_folder"} & vars(module).keys():
            patch.object(module, name, lambda _: None).start()


def no_second_read() -> None:
    """A read of the registry that failed is not tried again."""
    patch.object(registry, "READ_PAUSES_S", ()).start()


def foreign_death_believed() -> None:
    """A holder on another machine counts as dead."""
    judge = holder.judge

    def believing(*arguments: Any) -> tuple[str, str]:
        verdict, why = judge(*arguments)
        return (holder.DEAD if why == "it is on another machine" else verdict), why

    patch.object(registry_lock, "judge", believing).start()


MUTANTS: Mapping[str, Callable[[], None]] = {
    "": lambda: None,
    **{
        mutant.__name__: mutant
        for mutant in (
            open_before_lock,
            no_inbox_lock,
            no_registry_lock,
            no_folder_open,
            no_second_read,
            foreign_death_believed,
        )
    },
}
"""What is patched into the package in one call's process, by name; ``""`` is the package as it is."""
