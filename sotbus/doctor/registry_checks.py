"""Checks of registry.json and of the stamps in it."""

from __future__ import annotations

import os
import shlex
import stat

from sotbus.comm import registry_json
from sotbus.comm.handles import is_handle
from sotbus.comm.liveness import age_s, is_live
from sotbus.comm.registry import entry_of, read_file, text_of
from sotbus.doctor.check import NotJudged, Verdict, counted, fault, some, sound
from sotbus.doctor.place import Place

SKEW_S = 5
"""Stamps are whole seconds, and a write may wait a moment between its stamp and its rename."""

STAMPS = ("last_seen", "joined", "status_at")


def registry(place: Place) -> Verdict:
    """The registry is a file that can be read."""
    path = place.folder.registry
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return fault(f"{path} is missing", "run: sotbus init; then each session joins again: sotbus join")
    if not stat.S_ISREG(mode):
        return fault(f"{path} is no regular file", _aside(path))
    try:
        read_file(path)
    except OSError as error:
        return fault(f"{path} cannot be read: {error.strerror or error}", f"look at it: ls -l {shlex.quote(path)}")
    return sound(path)


def registry_empty(place: Place) -> Verdict:
    """The registry holds something; every writer refuses an empty one."""
    if place.registry_text == b"":
        return fault(f"{place.folder.registry} is empty, so nobody can be reached", _aside(place.folder.registry))
    return sound(counted(len(place.registry_text), "byte"))


def registry_json_(place: Place) -> Verdict:
    """The registry is one JSON document whose ``agents`` are an object."""
    if place.registry_text == b"":
        raise NotJudged("the registry is empty (see registry-empty)")
    try:
        registry_json.parse(place.registry_text)
    except registry_json.NotARegistryError as error:
        return fault(f"{place.folder.registry}: {error}", _aside(place.folder.registry))
    return sound("one JSON document with its agents")


def _aside(path: str) -> str:
    aside = f"mv {shlex.quote(path)} {shlex.quote(path + '.broken')}"
    return f"run: {aside} && sotbus init; then each session joins again: sotbus join"


def registry_entries(place: Place) -> Verdict:
    """Every key is a handle and every entry an object."""
    path = place.folder.registry
    strange = [repr(name) for name in place.agents if not is_handle(name)]
    if strange:
        return fault(
            f"no handle: {some(strange)}", f"while no command runs, take these keys out of {shlex.quote(path)} by hand"
        )
    broken = [name for name in place.agents if entry_of(place.agents, name) is None]
    if broken:
        return fault(
            f"no object stands at: {some(['@' + name for name in broken])}",
            f"run: {' && '.join(f'sotbus leave --name {name}' for name in broken)}; their sessions then join again",
        )
    now = place.clock()
    live = sum(is_live(text_of(entry_of(place.agents, name), "last_seen"), now) for name in place.agents)
    return sound(f"{counted(len(place.agents), 'handle')}, {live} live")


def clock_skew(place: Place) -> Verdict:
    """No stamp and no file time lies ahead of this clock, and no stamp ahead of the time of the file that holds it.

    A stamp was made before it was written, so one that is later than the file's own time was made by a clock that is
    ahead of the one that the file system goes by.
    """
    agents, now = place.agents, place.clock()
    try:
        written = os.stat(place.folder.registry).st_mtime
    except OSError as error:
        raise NotJudged("the registry cannot be read (see registry)") from error
    found: dict[str, tuple[int, str]] = {}
    for name in agents:
        entry = entry_of(agents, name)
        for field in STAMPS if entry else ():
            for clock, whose in ((now, "this box's clock"), (written, "the registry file's own time")):
                age = age_s(text_of(entry, field), clock)
                if age is not None and -age > SKEW_S and -age > found.get(name, (0, ""))[0]:
                    host = text_of(entry, "host")
                    where = f" (host {host})" if host else ""
                    found[name] = -age, f"the {field} of @{name}{where} is {-age}s ahead of {whose}"
    texts = [text for _, text in sorted(found.values(), reverse=True)]
    if written - now > SKEW_S:
        texts.insert(0, f"registry.json was written {int(written - now)}s ahead of this box's clock")
    if texts:
        return fault(some(texts), "set the clocks right on these hosts and here: timedatectl set-ntp true")
    return sound(f"no stamp is more than {SKEW_S}s ahead")
