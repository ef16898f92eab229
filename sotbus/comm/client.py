"""A client of one comm folder: the folder, the machine, the session, and who that session is."""

from __future__ import annotations

import time

from sotbus.comm import self_file
from sotbus.comm.project import Project, project_here
from sotbus.comm.registry import Registry, entry_of, text_of
from sotbus.comm.self_file import SelfFile
from sotbus.comm.session import Session, session_here
from sotbus.comm.topology import NO_TOPOLOGY
from sotbus.comm.writer_gate import WriterGate
from sotbus.errors import FolderError, NotJoined, RegistryUnreadable, SotbusError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from sotbus.comm.box import Box
    from sotbus.comm.folder import Folder
    from sotbus.comm.settings import Settings
    from sotbus.comm.topology import Topology


class Client:
    """What an operation needs, put together once a command.

    :param notify: takes a line for the person at the terminal (a note, a warning); never part of an answer.
    :param topology: whose comm folder it is; without one this box stands in for the folder's hub.
    :param clock: seconds since the epoch, the reader's clock.
    """

    def __init__(
        self,
        folder: Folder,
        box: Box,
        environ: Mapping[str, str],
        settings: Settings,
        *,
        notify: Callable[[str], None],
        topology: Topology = NO_TOPOLOGY,
        clock: Callable[[], float] = time.time,
        registry: Registry | None = None,
    ) -> None:
        self.folder = folder
        self.box = box
        self.environ = environ
        self.settings = settings
        self.notify = notify
        self.topology = topology
        self.clock = clock
        self.registry = registry or Registry(folder, box)
        self.writer_gate = WriterGate(folder, box, topology)
        self._session: Session | None = None
        self._project: Project | None = None

    def __repr__(self) -> str:
        return f"<Client {self.folder.root} on {self.box.declared_host}>"

    @property
    def session(self) -> Session:
        """This process's session, read once. *Errors*: FolderError for a host that cannot name a file."""
        if self._session is None:
            self._session = session_here(self.folder, self.box, self.environ, self.project.root)
        return self._session

    @property
    def project(self) -> Project:
        """The project around the working directory, read once. *Errors*: :class:`SotbusError` where that is gone."""
        if self._project is None:
            try:
                self._project = project_here(self.environ)
            except OSError as error:
                raise SotbusError(f"the working directory cannot be told: {error.strerror}") from error
        return self._project

    def ensure(self) -> None:
        """Make the folder and the registry where there are none. *Errors*: FolderError, RegistryWriteFailed."""
        self.folder.ensure()
        self.registry.create()

    def identity(self, agents: Mapping[str, Any] | None = None, *, adopt: bool = False, check: bool = True) -> SelfFile:
        """The handle this session acts as here; the agent gate is held for a pin or a row.

        Its own self file names it. Without one, the box's shared file does, where it names this root and no other live
        session holds that handle.

        :param agents: the registry's entries where the caller has read them.
        :param adopt: take a dead session's handle for this session, so that no other one does; for commands that act.
        :param check: refuse an own handle that has been taken since; a leave wants to know it all the same.

        *Errors*: :class:`NotJoined`, also where the handle has been taken by another session or project since;
        :class:`GateRefused`.
        """
        if agents is None:
            try:
                agents = self.registry.agents()
            except RegistryUnreadable:
                agents = None
        session, root = self.session, self.project.root
        own = self_file.read(session.own_path)
        if own is not None and own.root == root:
            entry = entry_of(agents, own.handle) if agents is not None else None
            session.check_gate(entry)
            if check:
                self._check_still_ours(own, entry)
            return own
        if own is not None:
            self.notify(f"note: {session.own_path} names @{own.handle} for {own.root}, not for this project; not used")
        elif self_file.legacy(session.own_path)[0]:
            self.notify(f"note: {session.own_path} has no usable root= line, so it names nobody")
        shared = self._shared()
        if shared is not None and shared.root == root and agents is not None:
            entry = entry_of(agents, shared.handle)
            if entry is not None and not session.taken_by_another(entry):
                self._check_still_ours(shared, entry)
                if "slot" not in entry or session.recorded_by(entry) or not adopt or self._adopt(shared):
                    return shared
        raise NotJoined("Not joined — run comm-join.sh first.", hint="sotbus join")

    def _shared(self) -> SelfFile | None:
        """What the box's shared file names; one that cannot be read names nobody, and is said."""
        if self.session.shared_path is None:
            return None
        try:
            return self_file.read(self.session.shared_path)
        except FolderError as error:
            self.notify(f"note: {error}")
            return None

    def _check_still_ours(self, identity: SelfFile, entry: Mapping[str, Any] | None) -> None:
        """Refuse a handle that another project, or another live session of this box, has taken since."""
        root = text_of(entry, "root")
        if root not in ("", identity.root):
            raise NotJoined(
                f"your sot-comm identity '@{identity.handle}' is registered to a DIFFERENT project's root ('{root}'); "
                "it is not used here",
                hint="take a handle for this project: sotbus join",
            )
        if entry is not None and self.session.taken_by_another(entry):
            raise NotJoined(
                f"@{identity.handle} has been taken by another session (pid {entry.get('pid')}); it is not used here",
                hint="take another handle: sotbus join",
            )

    def _adopt(self, shared: SelfFile) -> bool:
        """Take a dead session's handle for this one: its process into the entry, a self file of our own."""
        session = self.session
        adopted: list[bool] = []

        def change(document: dict[str, Any]) -> bool:
            entry = entry_of(document["agents"], shared.handle)
            if entry is None or text_of(entry, "root") != shared.root or session.taken_by_another(entry):
                return False
            for field in ("pid", "start", "pidns"):
                entry.pop(field, None)
            entry.update(session.entry_fields())
            adopted.append(True)
            return True

        try:
            self.registry.update(change, self.settings.touch_wait_s)
            if adopted:
                self_file.write(session.own_path, shared)
        except (SotbusError, OSError):
            return False
        return bool(adopted)
