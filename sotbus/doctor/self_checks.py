"""Checks of the self files, which keep each session's handle between its commands (sot-comm v1, The self file)."""

from __future__ import annotations

import re
import shlex

from sotbus.comm import self_file
from sotbus.comm.processes import HARNESSES, is_alive
from sotbus.comm.self_file import NOPANE
from sotbus.doctor.check import Verdict, counted, fault, some, sound
from sotbus.doctor.place import Place
from sotbus.errors import FolderError

OF_A_PROCESS = re.compile(
    rf"__sotbus-(?:(?:leader|{'|'.join(HARNESSES)})-(\d+)-(\d+)|tmux-(\d+)-(\d+)-\d+)-[0-9a-f]{{8}}\.txt$"
)
"""The own files that sotbus names after a session's process: its pid and start tick, or its tmux server's."""


def self_files(place: Place) -> Verdict:
    """Every self file can be read and names a handle and a root; one without a root names nobody."""
    names = _names(place)
    for name in names:
        path = _path(place, name)
        try:
            found = self_file.read(path)
        except FolderError as error:
            return fault(str(error).removeprefix("FAILED: "), f"remove it, then join again: rm {shlex.quote(path)}")
        if found is None:
            handle, _ = self_file.legacy(path)
            said = f"it has no usable root= line, so it names nobody (it says {handle or 'nothing'!r})"
            return fault(
                f"{path}: {said}",
                f"join again in that project with the same SOT_COMM_SELF_FILE or row, or: rm {shlex.quote(path)}",
            )
    return sound(counted(len(names), "self file"))


def self_handles(place: Place) -> Verdict:
    """The handle of each of this box's sessions is in the registry; files of sessions that have ended do not matter."""
    agents, unlisted, ended = place.agents, [], 0
    for name in _names(place):
        if name.endswith(NOPANE) or not _is_of_this_box(place, name):
            continue
        try:
            found = self_file.read(_path(place, name))
        except FolderError:
            continue  # self-files names it
        if found is None or found.handle in agents:
            continue
        if _has_ended(place, name):
            ended += 1
        else:
            unlisted.append((found.handle, name))
    if unlisted:
        texts = [f"@{handle} of {name}" for handle, name in unlisted]
        paths = shlex.join(_path(place, name) for _, name in unlisted)
        return fault(
            f"not in the registry: {some(texts)}",
            f"in the session: sotbus join --name {unlisted[0][0]}; where it has ended: rm {paths}",
        )
    return sound("every handle is listed" + (f"; {counted(ended, 'file')} of ended sessions" if ended else ""))


def _names(place: Place) -> list[str]:
    return [name for name in place.names_in("self") if name.endswith(".txt")]


def _path(place: Place, name: str) -> str:
    return f"{place.folder.selves}/{name}"


def _is_of_this_box(place: Place, name: str) -> bool:
    """Whether a file is this box's, by its name; a pinned file's name need not say."""
    return "__" not in name or name.startswith(place.box.declared_host + "__")


def _has_ended(place: Place, name: str) -> bool:
    """Whether the process that a file is named after is gone; false where its name tells no process."""
    match = OF_A_PROCESS.search(name)
    if match is None:
        return False
    pid, start = (word for word in match.groups() if word is not None)
    return not is_alive(int(pid), start, place.box.proc)
