"""A program's client of the comm folder: by the session that it runs in, or under a name of its own.

A program that takes a name is a session of its own: the terminal or the agent that started it keeps its handle.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from sotbus import config as configuration
from sotbus.assembly import assemble
from sotbus.comm import handles
from sotbus.comm.box import Box, host_problem
from sotbus.comm.client import Client
from sotbus.comm.folder import Folder
from sotbus.comm.processes import start_ticks
from sotbus.comm.project import project_of
from sotbus.comm.session import Session, session_here
from sotbus.errors import FolderError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class ProgramSession(Session):
    """The session of a program under a name of its own: its process is this one, and nobody handed it anything.

    Its self file is kept by name, so that a program that is started again finds its handle; the slot in its registry
    entry is the process's, so that two of a name at once are told apart.
    """

    __slots__ = ()

    @property
    def slot(self) -> str:
        return f"{os.path.basename(self.own_path)}-{self.process[0]}-{self.process[1]}"

    @property
    def guarded(self) -> bool:
        return False


class ProgramClient(Client):
    """A :class:`Client` that acts under a name of its own, or in a project that is named.

    :param name: the handle, or None for the session's own.
    :param project: a folder in the project to act for, or None for the working directory's.
    """

    def __init__(
        self, name: str | None, project: str | None, folder: Folder, box: Box, environ: Mapping[str, str], **more: Any
    ) -> None:
        super().__init__(folder, box, environ, **more)
        self._name = name
        if project is not None:
            self._project = project_of(project)

    @property
    def session(self) -> Session:
        if self._session is None and self._name is not None:
            here = session_here(self.folder, self.box, self.environ, self.project.root)
            path = f"{self.folder.selves}/{self_leaf(self.box.declared_host, self._name)}"
            process = (os.getpid(), start_ticks(os.getpid(), self.box.proc) or "")
            self._session = ProgramSession(path, None, "", process, "", here.ancestry, self.box)
        return super().session


def self_leaf(host: str, name: str) -> str:
    """The self file of a program's name. It has no ``__``, which would make part of it a row (facts 9)."""
    return f"{host}.program.{name}".replace("_", "%") + ".txt"


def client_maker(
    *,
    name: str | None,
    comm_home: str | None,
    config: str | None,
    project: str | None,
    notify: Callable[[str], None],
) -> Callable[[], Client]:
    """What makes clients of one session that can each be another thread's.

    The file system is read when a client is made, in the caller's thread; the arguments are checked here.

    *Errors*: BadHandle; of the clients' making: ConfigError, FolderError, PluginError.
    """
    if name is not None:
        handles.check(name)
    environ = dict(os.environ)
    if comm_home is not None:
        environ["SOT_COMM_HOME"] = os.path.abspath(comm_home)

    def make() -> Client:
        box = Box.here(environ)
        problem = host_problem(box.declared_host)
        if problem:
            raise FolderError(f"{problem}, so it cannot name a file", hint="set SOT_SELF_HOST to a plain host name")
        settings = configuration.load(configuration.find(environ, box.declared_host, config))
        return assemble(box, environ, settings, notify, partial(ProgramClient, name, project))

    return make
