"""The words of two runs of ``sotbus doctor --peer``: files in ``inbox/`` (:mod:`.rendezvous` is how they pair).

Each message is a new file, made whole under another name and then renamed, and it is found by listing the folder. That
is right at once on NFS, where a name that was asked for before may be missing for 30 s; where a client lists from its
cache all the same, a file that it makes in the folder has it ask again. So what carries the proof depends on nothing
that is to be proved.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from sotbus.comm.folder import PRIVATE_FILE, remove_quietly
from sotbus.comm.handles import component
from sotbus.comm.registry import read_file, write_synced
from sotbus.doctor.place import PROBE_FILES

PEER_FILES = f"{PROBE_FILES}peer-"
"""How the names of these files begin, in ``inbox/``."""

FORM = 1
"""The form of what two runs say to each other; runs of different forms do not pair."""

ID_DIGITS = 16
"""Length of a run's random id, in hex digits."""


class Stopped(Exception):
    """The person, or the program's end, wants no more of it."""


class Pulse:
    """Ties the work to whoever waits for it: :attr:`at` says when it last went on, :meth:`stop` ends it.

    ``at`` is in monotonic seconds.
    """

    def __init__(self) -> None:
        self.at = time.monotonic()
        self._stop = threading.Event()

    def __repr__(self) -> str:
        return f"<Pulse {time.monotonic() - self.at:.1f}s ago>"

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()

    def stop(self) -> None:
        """The next :meth:`pause` raises."""
        self._stop.set()

    def pause(self, seconds: float = 0) -> None:
        """Wait. *Errors*: :class:`Stopped`."""
        self.at = time.monotonic()
        if self._stop.wait(seconds):
            raise Stopped
        self.at = time.monotonic()


@dataclass(frozen=True)
class Party:
    """One side, as its hello says it. A text that is not known is empty.

    ``record`` names its process as a lock record does, ``lock_manager`` is the identity of its lock manager for
    ``inbox/``, ``client`` the name by which its NFS client goes, ``faults`` the name, text and remedy of what its own
    checks found that bears on sharing the folder.
    """

    id: str
    form: int
    version: str
    host: str
    machine: str
    boot: str
    pid: int
    record: str
    lock_manager: str
    fstype: str
    source: str
    point: str
    options: str
    client: str
    faults: list[list[str]]

    def __repr__(self) -> str:
        return f"<Party {self.host} machine={self.machine or '-'} pid={self.pid}>"

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Party | None:
        """The party of a hello, or None where it is none."""
        kinds = {"form": int, "pid": int, "faults": list}
        try:
            values = {field.name: message[field.name] for field in fields(cls)}
            name, text, remedy = "", "", ""
            for name, text, remedy in values["faults"]:
                if not isinstance(name, str) or not isinstance(text, str) or not isinstance(remedy, str):
                    return None
        except (KeyError, TypeError, ValueError):
            return None
        right = all(isinstance(value, kinds.get(name, str)) for name, value in values.items())
        return cls(**values) if right else None

    def is_on_the_box_of(self, other: Party) -> bool:
        """Whether both run on one machine, as far as machine id and boot id can tell."""
        return (self.machine, self.boot) == (other.machine, other.boot)


class Run:
    """Another run as its files show it: the messages read so far, in their order; ``gone`` once its hello is."""

    def __init__(self, stem: str) -> None:
        self.stem = stem
        self.messages: list[dict[str, Any]] = []
        self.gone = False

    def __repr__(self) -> str:
        return f"<Run {self.stem}, {len(self.messages)} messages{', gone' if self.gone else ''}>"

    @property
    def party(self) -> Party | None:
        """Who it is; None where its hello cannot be used."""
        found = Party.of(self.messages[0]) if self.messages else None
        return (
            found if found is not None and len(found.id) == ID_DIGITS and self.stem.endswith(f"-{found.id}") else None
        )

    def count(self, kind: str, to: str) -> int:
        """How many messages of a kind it has for an id."""
        return sum(message.get("kind") == kind and message.get("to") == to for message in self.messages)

    @property
    def partner(self) -> str:
        """The id that it is paired with, or ``""``."""
        found = [message.get("to", "") for message in self.messages if message.get("kind") == "pair"]
        return str(found[-1]) if found else ""


class Board:
    """The messages of all runs in one folder, and this run's own. Use as a context manager: its files are then removed.

    :param folder: the folder that holds the messages (``inbox/``).
    """

    def __init__(self, folder: str, host: str, pulse: Pulse) -> None:
        self.folder = folder
        self.pulse = pulse
        self.id = os.urandom(ID_DIGITS // 2).hex()
        self.stem = f"{PEER_FILES}{component(host, 40)}-{os.getpid()}-{self.id}"
        self.posted = 0
        self.runs: dict[str, Run] = {}
        self._forgotten = 0
        self._news = True

    def __repr__(self) -> str:
        return f"<Board {self.stem}, {self.posted} posted>"

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *ended_by: object) -> None:
        self.sweep(self.id)

    def post(self, kind: str, **what: Any) -> None:
        """Say something. *Durability*: synced before it can be seen. *Errors*: OSError."""
        path = f"{self.folder}/{self.stem}.{self.posted}"
        write_synced(path + ".tmp", json.dumps({"kind": kind, **what}).encode())
        os.rename(path + ".tmp", path)
        self.posted += 1

    def look(self, only: Run | None = None) -> None:
        """List the folder and read what is new, of every run or of one. *Errors*: OSError."""
        if not self._news:
            self._change()
        self._news = False
        there: dict[str, set[int]] = {}
        for name in os.listdir(self.folder):
            stem, _, number = name.rpartition(".")
            if name.startswith(PEER_FILES) and number.isascii() and number.isdigit() and stem != self.stem:
                there.setdefault(stem, set()).add(int(number))
        for stem in [stem for stem in self.runs if 0 not in there.get(stem, ())]:
            self.runs.pop(stem).gone = True
        for stem, numbers in there.items():
            if 0 in numbers and (only is None or stem == only.stem):
                self._read(self.runs.setdefault(stem, Run(stem)), numbers)

    def _change(self) -> None:
        """Change the folder: then the client must list it anew, even one that goes by its cache (nocto, actimeo)."""
        path = f"{self.folder}/{self.stem}.look"
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, PRIVATE_FILE))
        os.unlink(path)

    def _read(self, run: Run, numbers: set[int]) -> None:
        """Messages are read in their order; one that cannot be read now (it was just removed) is tried again."""
        while len(run.messages) in numbers:
            try:
                message = json.loads(read_file(f"{self.folder}/{run.stem}.{len(run.messages)}"))
            except (OSError, ValueError, RecursionError):
                return
            if not isinstance(message, dict):
                return
            run.messages.append(message)
            self._news = True

    def forget(self, before: int) -> None:
        """Remove this run's messages that the other one has read, up to number ``before``, once they are talking."""
        for number in range(self._forgotten, min(before, self.posted)):
            remove_quietly(f"{self.folder}/{self.stem}.{number}")
        self._forgotten = max(self._forgotten, before)

    def keep(self) -> None:
        """What was said until now stays to the end: it tells the others that this run lives, and with whom it talks."""
        self._forgotten = self.posted

    def sweep(self, run_id: str) -> None:
        """Remove every file of a run, and the folder that it shares with its partner."""
        try:
            names = os.listdir(self.folder)
        except OSError:
            return
        for name in names:
            if name.startswith(PEER_FILES) and run_id in name:
                path = f"{self.folder}/{name}"
                remove_quietly(path)
                shutil.rmtree(path, ignore_errors=True)
