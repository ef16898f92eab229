"""The run: every check in its order, each with its stable name; a check that fails or hangs is itself a fault."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence

from sotbus.doctor import (
    box_checks,
    folder_checks,
    lock_checks,
    mail_checks,
    node_checks,
    registry_checks,
    self_checks,
)
from sotbus.doctor.check import FAULT, SKIPPED, Check, NotJudged, Verdict, fault
from sotbus.doctor.place import Place
from sotbus.errors import SotbusError

Judge = Callable[[Place], Verdict]

CHECKS: Sequence[tuple[str, Judge]] = (
    ("config", box_checks.config),
    ("plugins", box_checks.plugins),
    ("host-name", box_checks.host_name),
    ("machine-id", box_checks.machine_id),
    ("folder", folder_checks.folder),
    ("folder-parts", folder_checks.folder_parts),
    ("permissions", folder_checks.permissions),
    ("mount", folder_checks.mount),
    ("space", folder_checks.space),
    ("nfs-recovery", folder_checks.nfs_recovery),
    ("lock-manager", lock_checks.lock_manager),
    ("record", lock_checks.record),
    ("record-manager", lock_checks.record_manager),
    ("node", node_checks.node),
    ("registry", registry_checks.registry),
    ("registry-empty", registry_checks.registry_empty),
    ("registry-json", registry_checks.registry_json_),
    ("registry-entries", registry_checks.registry_entries),
    ("clock-skew", registry_checks.clock_skew),
    ("registry-lock", lock_checks.registry_lock),
    ("registry-lock-holder", lock_checks.registry_lock_holder),
    ("registry-lock-age", lock_checks.registry_lock_age),
    ("self-files", self_checks.self_files),
    ("self-handles", self_checks.self_handles),
    ("inbox-sizes", mail_checks.inbox_sizes),
    ("torn-tail", mail_checks.torn_tail),
    ("cursor-text", mail_checks.cursor_text),
    ("cursor-end", mail_checks.cursor_end),
    ("leftovers", folder_checks.leftovers),
)
"""Name and judge, in the order of the answer. The names are for programs and do not change."""

CHECK_BOUND_S = 20.0
"""No check waits for anything longer than a second; one that takes this long hangs on a mount that does not answer."""


def examine(name: str, judge: Judge, place: Place) -> Check:
    """One check. Never raises: what a judge raises is its fault, or, for NotJudged, what it was skipped for."""
    try:
        return Check.of(name, judge(place))
    except NotJudged as reason:
        return Check(name, SKIPPED, str(reason))
    except SotbusError as error:
        return Check(name, FAULT, str(error), error.hint or "see the text")
    except Exception as error:
        return Check.of(
            name,
            fault(
                f"the check itself failed: {type(error).__name__}: {error}",
                "run it again; if it stays so, report it with this line",
            ),
        )


def run(place: Place, checks: Sequence[tuple[str, Judge]] = CHECKS, bound_s: float = CHECK_BOUND_S) -> Iterator[Check]:
    """Every check, in order, each as soon as it is done. Changes nothing; takes no lock for longer than a read.

    The checks run in a thread of their own, because a read on a mount whose server is gone does not come back.

    :param bound_s: how long a check may take, in seconds. One that takes longer is a fault, and the rest are skipped.
    """
    done: queue.SimpleQueue[Check] = queue.SimpleQueue()

    def work() -> None:
        for name, judge in checks:
            done.put(examine(name, judge, place))

    threading.Thread(target=work, name="sotbus-doctor", daemon=True).start()
    for number, (name, _) in enumerate(checks):
        try:
            yield done.get(timeout=bound_s)
        except queue.Empty:
            yield Check(
                name,
                FAULT,
                f"it was not done within {bound_s:g}s: the file system may not answer",
                "see that the server of the mount can be reached, then run it again",
            )
            for skipped, _ in checks[number + 1 :]:
                yield Check(skipped, SKIPPED, f"not tried, because {name} was not done")
            return
