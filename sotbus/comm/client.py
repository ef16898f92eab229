"""A client of one comm folder: the folder, the machine, the session, and who that session is."""

from __future__ import annotations

import time

from sotbus.comm.manager_record import WriterGate
from sotbus.comm.project import Project, project_here
from sotbus.comm.registry import Registry, entry_of
from sotbus.comm.session import Session, identify, session_here
from sotbus.errors import NotJoined, SotbusError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from sotbus.comm.box import Box
    from sotbus.comm.folder import Folder
    from sotbus.comm.self_file import SelfFile
    from sotbus.comm.settings import Settings


class Client:
    """What an operation needs, put together once a command.

    :param notify: takes a line for the person at the terminal (a note, a warning); never part of an answer.
    :param stand_in: whether this box stands in for the folder's hub (no topology is configured).
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
        stand_in: bool = True,
        clock: Callable[[], float] = time.time,
        registry: Registry | None = None,
    ) -> None:
        self.folder = folder
        self.box = box
        self.environ = environ
        self.settings = settings
        self.notify = notify
        self.stand_in = stand_in
        self.clock = clock
        self.registry = registry or Registry(folder, box)
        self.writer_gate = WriterGate(folder, box, stand_in=stand_in)
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

    def identity(self, agents: Mapping[str, Any] | None = None) -> SelfFile:
        """The handle this session acts as here; the agent gate is held for a pin or a row.

        :param agents: the registry's entries where the caller has read them.

        *Errors*: :class:`NotJoined`; :class:`GateRefused`.
        """

        def entry(handle: str) -> Mapping[str, Any] | None:
            return entry_of(agents, handle) if agents is not None else self._entry(handle)

        found, note = identify(self.session, self.project, self.box, entry)
        if note:
            self.notify(note)
        if found is None:
            raise NotJoined("Not joined — run comm-join.sh first.", hint="sotbus join")
        if self.session.guarded:
            self.session.check_gate(entry(found.handle))
        return found

    def _entry(self, handle: str) -> Mapping[str, Any] | None:
        """A handle's entry, or None; an unreadable registry is told where a command needs more of it."""
        try:
            return entry_of(self.registry.agents(), handle)
        except SotbusError:
            return None
