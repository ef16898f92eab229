"""The project that a process works in: the git checkout around it, else its folder (facts 9)."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


class Project:
    """``root`` is canonical, ``repo`` the folder's name as it was written before links were resolved."""

    __slots__ = ("repo", "root")

    def __init__(self, root: str, repo: str) -> None:
        self.root = root
        self.repo = repo

    def __repr__(self) -> str:
        return f"<Project {self.root}>"


def project_of(folder: str, logical: str | None = None) -> Project:
    """The project around a folder. :param logical: the same folder as the shell names it, with its links."""
    here = os.path.realpath(folder)
    top = here
    while not _is_checkout(top):
        above = os.path.dirname(top)
        if above == top:
            return Project(here, os.path.basename(logical or folder) or os.path.basename(here))
        top = above
    return Project(top, os.path.basename(top))


def project_here(environ: Mapping[str, str]) -> Project:
    """The project around this process's directory.

    *Errors*: OSError where the directory is gone.
    """
    here = os.getcwd()
    logical = environ.get("PWD", "")
    if os.path.isabs(logical):
        try:
            if os.path.samefile(logical, here):
                return project_of(here, logical)
        except OSError:
            pass
    return project_of(here)


def _is_checkout(folder: str) -> bool:
    """Whether git takes this folder for the top of a work tree: a ``.git`` file, or a ``.git`` folder with a HEAD."""
    git = folder + "/.git"
    return os.path.isfile(git) or os.path.lexists(git + "/HEAD")
