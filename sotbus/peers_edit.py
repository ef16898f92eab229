"""Changing the peers file: a peer added, changed or taken out, and everything else in the file left as it is."""

from __future__ import annotations

import os

from sotbus.comm.flock import FileLock, LockTimeoutError, acquire
from sotbus.comm.folder import remove_quietly, write_whole
from sotbus.errors import ConfigError
from sotbus.peers import TABLE, Peer, header, judge, text_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

LOCK_WAIT_S = 5.0
"""How long a change of the file waits for another one, which takes milliseconds."""


def write(path: str, peers: Iterable[Peer]) -> None:
    """Write a peers file with these peers and nothing else, mode 0600.

    *Durability*: file and folder are synced; a crash leaves the old file or the new one, whole.
    *Errors*: :class:`ConfigError`, also for peers that :func:`read` would refuse; the old file stands then.
    """
    _put(path, "".join(_table(peer) for peer in peers).lstrip("\n"))


def put(path: str, peer: Peer) -> Peer | None:
    """Add a peer, or put it in the place of the one with its name; answers that one.

    The rest of the file stays as it is, comments included. Of two processes that do this at once one waits.

    *Durability* and *Errors* as :func:`write`; a file that is wrong already is not touched.
    """
    with _locked(path):
        text = text_of(path)
        peers = _sound(path, text)
        old = next((one for one in peers if one.is_called(peer.name)), None)
        wanted = [peer if one is old else one for one in peers] + ([] if old else [peer])
        _put(path, _edited(text, old, _table(peer), wanted))
    return old


def remove(path: str, name: str) -> Peer | None:
    """Take a peer out; answers it, or None where it is not there. As :func:`put` otherwise."""
    with _locked(path):
        text = text_of(path)
        peers = _sound(path, text)
        old = next((one for one in peers if one.is_called(name)), None)
        if old is not None:
            _put(path, _edited(text, old, "", [one for one in peers if one is not old]))
    return old


def _sound(path: str, text: str) -> tuple[Peer, ...]:
    peers, problems = judge(path, text)
    if problems:
        raise ConfigError(str(problems[0]), hint="mend the file first; nothing was changed")
    return peers


def _table(peer: Peer) -> str:
    """A peer as the file has it. Each value is of characters that TOML takes as they are, once they are judged."""
    lines = [
        "",
        header(peer.name),
        f'user = "{peer.user}"',
        f'public_key = "{peer.public_key}"',
        f'role = "{peer.role}"',
    ]
    if peer.address is not None:
        lines.append(f'address = "{peer.address}"')
    return "\n".join(lines) + "\n"


def _edited(text: str, old: Peer | None, table: str, wanted: list[Peer]) -> str:
    """The text with one peer's table put in the place of the old one, or at the end; all else kept where it can be."""
    from sotbus.toml_lines import lines_of

    changed = text if not text or text.endswith("\n") else f"{text}\n"
    rows = changed.splitlines(keepends=True)
    if old is None:
        rows.append(table if rows else table.lstrip("\n"))
    else:
        lines = lines_of(changed)
        begin = lines.get((TABLE, old.name))
        mine = [line for at, line in lines.items() if at[:2] == (TABLE, old.name)]
        if begin is not None:
            rows[begin - 1 : max(mine)] = [table.lstrip("\n")]
            if not table and begin > 1 and not rows[begin - 2].strip():
                rows[begin - 2] = ""
    changed = "".join(rows)
    if not table:
        changed = changed.lstrip("\n")
    peers, problems = judge("", changed)
    if not problems and sorted(peers, key=_by_name) == sorted(wanted, key=_by_name):
        return changed
    return "".join(_table(peer) for peer in wanted).lstrip("\n")  # written in a way that this cannot edit


def _by_name(peer: Peer) -> str:
    return peer.name


def _put(path: str, text: str) -> None:
    """The file, whole, by a rename. *Errors*: ConfigError."""
    problems = judge(path, text)[1]
    if problems:
        raise ConfigError(f"{problems[0].text}; nothing was changed")
    where = os.path.realpath(path)
    temp = f"{where}.tmp.{os.getpid()}.{os.urandom(4).hex()}"  # other boxes have the same pids
    try:
        os.makedirs(os.path.dirname(where), 0o700, exist_ok=True)
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                write_whole(fd, text.encode("utf-8"))
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(temp, where)
        except BaseException:
            remove_quietly(temp)
            raise
        _sync(os.path.dirname(where))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}; nothing was changed") from error


def _sync(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _locked(path: str) -> FileLock:
    """One process at a time changes the file. *Errors*: ConfigError, past LOCK_WAIT_S too."""
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), 0o700, exist_ok=True)
        return acquire(f"{path}.lock", exclusive=True, bound_s=LOCK_WAIT_S, polling=True)
    except LockTimeoutError:
        raise ConfigError(f"{path}: another process has been changing it for {LOCK_WAIT_S:g}s") from None
    except OSError as error:
        raise ConfigError(f"{path}.lock: cannot be locked: {error.strerror or error}") from error
