"""Join and leave: how a session takes a handle, and gives it back (sot-comm v1, registry.json; facts 8.4 and 8.6)."""

from __future__ import annotations

import os

from sotbus.comm import handles, self_file
from sotbus.comm.folder import PRIVATE_FILE, sync_folder
from sotbus.comm.liveness import is_live
from sotbus.comm.processes import start_ticks
from sotbus.comm.registry import entry_of, text_of
from sotbus.comm.registry_json import PROTOCOL_VERSION
from sotbus.comm.self_file import SelfFile
from sotbus.errors import (
    BadRequest,
    FolderError,
    RegistryLockFailed,
    RegistryUnreadable,
    RegistryWriteFailed,
    SlotTaken,
)
from sotbus.message import shown, stamp

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from sotbus.comm.client import Client

OURS, ANOTHERS, ABSENT = "removed", "another's", "absent"
"""What a leave found in the registry."""


class Joined:
    """A join's result. ``beside`` is the derived handle that another session kept, or ``""``; ``others`` are listed."""

    __slots__ = ("beside", "handle", "inbox", "others", "repo")

    def __init__(self, handle: str, repo: str, inbox: str, others: list[str], beside: str) -> None:
        self.handle = handle
        self.repo = repo
        self.inbox = inbox
        self.others = others
        self.beside = beside


def join(
    client: Client,
    *,
    name: str | None = None,
    expertise: Sequence[str] = (),
    repin: bool = False,
    pid: int | None = None,
    watch: Callable[[tuple[int, str]], str] | None = None,
) -> Joined:
    """Take a handle: write the whole entry, the self file and an empty inbox.

    :param name: the handle, word for word; else ``$SOT_COMM_NAME``, else the one this session has, else derived.
    :param repin: take a slot that names another project, or a handle that another live session of this box holds.
    :param pid: the process whose life is the session's; else the harness, else the session leader.
    :param watch: has this box's node watch that process (pid, start tick); answers the row it gave, or ``""``.

    *Durability*: entry and inbox are synced, and the inbox's folder.
    *Errors*: :class:`SlotTaken` and :class:`BadHandle`, nothing written; the registry's; :class:`FolderError` where the
    entry stands and the self file or the inbox could not be written.
    """
    session, project = client.session, client.project
    wanted = name if name is not None else client.environ.get("SOT_COMM_NAME") or None
    if wanted is not None:
        handles.check(wanted)
    _check_project(client)
    session.check_names()
    _check_slot(client, repin)
    session.check_gate(_entry_now(client, self_file.read(session.own_path)))
    if pid is not None:
        session.process = _process(client, pid)
    client.ensure()
    if watch is not None and not session.row and session.process[0]:
        session.row = watch(session.process)
    warning = client.folder.tighten()
    if warning:
        client.notify(warning)
    taken: dict[str, Any] = {}

    def put(document: dict[str, Any]) -> bool:
        agents: dict[str, Any] = document["agents"]
        handle, beside = _choose(client, agents, wanted, repin)
        taken["qualified"] = "" if wanted else _live_bare_name(client, agents, handle)
        now = stamp(client.clock())
        agents[handle] = _entry(client, agents.get(handle), now, expertise)
        taken.update(handle=handle, beside=beside, others=sorted(other for other in agents if other != handle))
        taken["version"] = document.get("protocol_version")
        return True

    try:
        client.registry.update(put, client.settings.lock_wait_s)
    except RegistryWriteFailed as error:
        if wanted is None and isinstance(error.__cause__, RegistryUnreadable):
            raise RegistryWriteFailed(
                "FAILED: the registry could not be read, so no handle was derived; nothing was written",
                hint=error.__cause__.hint,
            ) from error
        raise
    if taken["qualified"]:
        client.notify(
            f"WARNING: @{taken['qualified']} is live in another project, so this session is @{taken['handle']}; "
            "mail to the plain name goes there"
        )
    version = taken["version"]
    if version != PROTOCOL_VERSION or isinstance(version, bool):
        client.notify(
            f"WARNING: registry protocol v{version} != client v{PROTOCOL_VERSION}: "
            "another release wrote this registry; update sotbus or that release before you rely on delivery"
        )
    identity = SelfFile(taken["handle"], project.repo, project.root)
    _write_identity(client, identity)
    return Joined(identity.handle, project.repo, client.folder.inbox(identity.handle), taken["others"], taken["beside"])


def _choose(client: Client, agents: dict[str, Any], wanted: str | None, repin: bool) -> tuple[str, str]:
    """The handle to write, decided under the registry lock, and the derived one that was left to another session."""
    session, project = client.session, client.project

    def held(handle: str) -> bool:
        return session.taken_by_another(entry_of(agents, handle))

    def free(handle: str) -> bool:
        root = text_of(entry_of(agents, handle), "root")
        return handle not in agents or (root == project.root and not held(handle))

    if wanted is not None:
        if held(wanted) and not repin:
            entry = entry_of(agents, wanted) or {}
            raise SlotTaken(
                f"@{wanted} is held by another live session of this box (pid {entry.get('pid')}, in "
                f"{text_of(entry, 'root')}); nothing was written",
                hint="choose another name, or take this one with --repin",
            )
        _warn_of_live_owner(client, agents, wanted)
        return wanted, ""
    own = self_file.read(session.own_path)
    if own is not None and own.root == project.root and free(own.handle):
        return own.handle, ""
    if session.shared_path is not None:
        shared = self_file.read(session.shared_path)
        if shared is not None and shared.root == project.root and shared.handle in agents and free(shared.handle):
            return shared.handle, ""
    derived = handles.derive(project.root, client.box.raw_host, agents)
    handle = handles.beside(derived, free)
    return handle, derived if handle != derived else ""


def _live_bare_name(client: Client, agents: dict[str, Any], handle: str) -> str:
    """The unqualified name, where a live session of another project has it and this one was qualified; else ``""``."""
    bare = handles.tiers(client.project.root, client.box.raw_host)[0]
    entry = entry_of(agents, bare)
    if entry is None or handle == bare or text_of(entry, "root") == client.project.root:
        return ""
    return bare if is_live(entry.get("last_seen"), client.clock()) else ""


def _warn_of_live_owner(client: Client, agents: dict[str, Any], wanted: str) -> None:
    """A name is taken word for word, so say it loudly where another project's session was live under it."""
    entry = entry_of(agents, wanted)
    root = text_of(entry, "root")
    if entry is None or root in ("", client.project.root) or client.session.recorded_by(entry):
        return
    if is_live(entry.get("last_seen"), client.clock()):
        client.notify(
            f"WARNING: @{wanted} was live until now, for {shown(root)} on {shown(text_of(entry, 'host'))}; "
            "its mail now comes to this session"
        )


def _entry(client: Client, old: object, now: str, expertise: Sequence[str]) -> dict[str, Any]:
    """A whole entry, as a join writes it: the page's fields, then those that sotbus adds (decisions, sot-comm 10)."""
    session, project = client.session, client.project
    entry: dict[str, Any] = {
        "host": client.box.declared_host,
        "workspace_id": session.row,
        "repo": project.repo,
        "root": project.root,
        "expertise": list(expertise),
        "status": "idle",
        "joined": now,
        "last_seen": now,
    }
    if session.harness:
        entry["harness"] = session.harness
    entry["instance"] = _instance(client, old)
    return entry | session.entry_fields()


def _instance(client: Client, old: object) -> str:
    """The session's instance ID: its harness's, else the one it has, else a new UUID."""
    import uuid

    if client.session.harness == "claude":
        try:
            return str(uuid.UUID(client.environ.get("CLAUDE_CODE_SESSION_ID", "")))
        except ValueError:
            pass
    if isinstance(old, dict) and client.session.recorded_by(old):
        kept = old.get("instance")
        if isinstance(kept, str) and kept:
            return kept
    return str(uuid.uuid4())


def _check_project(client: Client) -> None:
    """Refuse a project folder whose path a self file or a registry could not carry. *Errors*: BadRequest."""
    for path in (client.project.root, client.project.repo):
        if any(c < " " or c == "\x7f" for c in path):
            raise BadRequest(
                f"FAILED: the project folder's name has a control character ({path!r}); nothing was written"
            )
        if any("\ud800" <= c <= "\udfff" for c in path):
            raise BadRequest(f"FAILED: the project folder's name is not UTF-8 ({path!r}); nothing was written")


def _process(client: Client, pid: int) -> tuple[int, str]:
    """The process to record. *Errors*: FolderError where it runs nowhere here."""
    try:
        start = start_ticks(pid, client.box.proc)
    except OSError:
        start = None
    if start is None:
        raise FolderError(f"FAILED: there is no process {pid} here, so nothing was written")
    return pid, start


def _check_slot(client: Client, repin: bool) -> None:
    """The conflict guard: a row's or a pin's slot that names another project is refused (facts 9)."""
    session, project = client.session, client.project
    if repin or not session.guarded:
        return
    there = self_file.read(session.own_path)
    other, repo = self_file.legacy(session.own_path)
    if there is not None and there.root != project.root:
        raise SlotTaken(
            f"{session.own_path} holds @{there.handle} for another project ({there.root}); nothing was written",
            hint="join from that project, or put this one there with --repin",
        )
    if there is None and other and repo not in ("", project.repo):
        raise SlotTaken(
            f"{session.own_path} holds @{other} for another project; nothing was written",
            hint="put this one there with --repin",
        )


def _entry_now(client: Client, identity: SelfFile | None) -> dict[str, Any] | None:
    if identity is None:
        return None
    try:
        return entry_of(client.registry.agents(), identity.handle)
    except RegistryUnreadable:
        return None


def _write_identity(client: Client, identity: SelfFile) -> None:
    """The self files and the inbox, after the entry. *Errors*: FolderError, naming what failed."""
    session, folder = client.session, client.folder
    step = session.own_path
    try:
        self_file.write(session.own_path, identity)
        if session.shared_path is not None:
            step = session.shared_path
            self_file.write(session.shared_path, identity)
        step = folder.inbox(identity.handle)
        fd = os.open(step, os.O_WRONLY | os.O_APPEND | os.O_CREAT, PRIVATE_FILE)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        sync_folder(folder.inboxes)
    except OSError as error:
        raise FolderError(
            f"FAILED: @{identity.handle} is in the registry, but {step} could not be written "
            f"({error.strerror or error}); join again when that is mended"
        ) from error


def leave(client: Client, name: str | None = None) -> tuple[str, str]:
    """Give a handle back: delete the entry; for this session's own, its self files too. Inbox and cursor stay.

    Answers the handle and what was found: ``removed``, ``absent``, or ``another's`` (the handle has been taken by
    another session since, whose entry is left alone).

    *Errors*: :class:`NotJoined`; the registry's, nothing written.
    """
    identity = client.identity(check=False) if name is None else None
    handle = identity.handle if identity else handles.check(name or "")
    found: list[str] = []

    def drop(document: dict[str, Any]) -> bool:
        agents: dict[str, Any] = document["agents"]
        if handle not in agents:
            found.append(ABSENT)
            return False
        entry = entry_of(agents, handle)
        if identity is not None and (
            text_of(entry, "root") not in ("", identity.root) or client.session.taken_by_another(entry)
        ):
            found.append(ANOTHERS)
            return False
        del agents[handle]
        found.append(OURS)
        return True

    try:
        client.registry.update(drop, client.settings.lock_wait_s)
    except RegistryLockFailed:
        raise
    except RegistryWriteFailed as error:
        if isinstance(error.__cause__, RegistryUnreadable):
            raise RegistryWriteFailed(
                "FAILED: the registry could not be read; nothing was removed", hint=error.hint
            ) from error
        raise
    if identity is not None:
        _drop_self_files(client, identity)
    return handle, found[0]


def _drop_self_files(client: Client, identity: SelfFile) -> None:
    """Remove this session's self files: the shared one where it names the same handle for this root, then its own.

    In this order a leave that dies between the two is finished by the next one.
    """
    for path in (client.session.shared_path, client.session.own_path):
        there = self_file.read(path) if path else None
        if path and there is not None and (there.handle, there.root) == (identity.handle, identity.root):
            try:
                os.unlink(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                client.notify(f"note: {path} could not be removed ({error.strerror})")
