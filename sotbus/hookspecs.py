"""The hooks and nothing else. Each is a synchronous factory; what it returns has the behaviour.

Provisional until all that the first version is to have is built on them. Each is documented with an example in
``docs/plugins.md``.
"""

from __future__ import annotations

import pluggy

from sotbus.comm.mounts import Mount
from sotbus.contracts import BoxFacts, Delivery, Harness, LockManager, Waker

PROJECT = "sotbus"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def sotbus_settings() -> type | None:
    """The type of the plugin's own TOML table, or None. Called when the config is read.

    A frozen dataclass; the table is ``[plugin.<name>]``, and its values come back as ``box.settings``.
    """


@hookspec(firstresult=True)
def sotbus_lock_manager(mount: Mount | None, machine_id: str | None) -> LockManager | None:
    """How to exclude on this mount, or None: not this plugin's kind of mount. Called when a folder is first used.

    :param mount: the mount that the inbox folder lies on, None where there is none to be read.
    :param machine_id: this machine's id, None where it has none.
    """


@hookspec
def sotbus_delivery(box: BoxFacts) -> Delivery | None:
    """A way for mail to reach a mailbox, or None. Called once at the start of a node, and by its check.

    :param box: the box that asks, and the plugin's own settings.
    """


@hookspec
def sotbus_wake(box: BoxFacts) -> Waker | None:
    """How an idle session is told that it has mail, or None. The bus does not call it yet.

    :param box: the box that asks, and the plugin's own settings.
    """


@hookspec
def sotbus_harness() -> Harness | None:
    """One kind of session, or None. The bus does not call it yet."""
