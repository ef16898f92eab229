"""This node's key pair in its file: made once, read by its owner only, never shown.

A file that another user could have read or put there is refused, as ssh refuses such a key (ssh(1), Files). Nothing
here loads ZeroMQ but the making of a new pair.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time

from sotbus.api import BadRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

KEY_CHARACTERS = 40
"""A CURVE key, 32 bytes, in Z85 (ZeroMQ RFC 32)."""

Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"

MAX_FILE_BYTES = 4096
"""A key file is some 200 bytes; what is longer is something else."""

OTHERS = 0o077
OTHERS_WRITE = 0o022

NEW = "make one with 'sotbus keys new'"


class KeyFileError(BadRequest):
    """A key file cannot be made or used; the text names the file and what is wrong, and has nothing of its content."""


class KeyPair:
    """A CURVE key pair, both halves in Z85. Its secret half stands in no repr and no error."""

    __slots__ = ("public", "secret")

    def __init__(self, public: str, secret: str) -> None:
        self.public = public
        self.secret = secret

    def __repr__(self) -> str:
        return f"<KeyPair {self.public}>"

    @classmethod
    def new(cls) -> Self:
        """A new pair, from the system's random numbers. *Errors*: KeyFileError where libzmq was built without CURVE."""
        import zmq

        if not zmq.has("curve"):
            raise KeyFileError("this libzmq was built without CURVE, so it can make no key and no link")
        public, secret = zmq.curve_keypair()
        return cls(public.decode("ascii"), secret.decode("ascii"))


def key_path(configured: str | None, config_folder: str, host: str) -> str:
    """Where a node's key file is: as configured, else a name of this host alone, also where boxes share a home."""
    return os.path.expanduser(configured) if configured else f"{config_folder}/{host.replace('/', '_')}.key"


def fingerprint(public: str) -> str:
    """A key as two people compare it over the telephone: SHA-256 of its Z85 text, in groups of four hex digits."""
    digest = hashlib.sha256(public.encode("ascii")).hexdigest()[:32]
    return " ".join(digest[at : at + 4] for at in range(0, len(digest), 4))


def is_key(text: object) -> bool:
    """Whether a text is 40 characters of Z85."""
    return isinstance(text, str) and len(text) == KEY_CHARACTERS and not text.strip(Z85)


def load(path: str) -> KeyPair:
    """Read a key pair.

    *Errors*: :class:`KeyFileError` where there is none, where it is a symlink or no regular file, where it or its
    folder belongs to another user or may be written by others, where others may read it, or where it is no key file.
    """
    _check_folder(path)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise KeyFileError(f"there is no key file {path}", hint=NEW) from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise KeyFileError(
                f"the key file {path} is a symlink, so it is not used", hint="put the file there"
            ) from None
        raise KeyFileError(f"the key file {path} cannot be opened: {error.strerror or error}") from None
    with open(fd, "rb") as file:
        _check_file(path, os.fstat(fd))
        try:
            data = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise KeyFileError(f"the key file {path} cannot be read: {error.strerror or error}") from None
    return _parse(path, data)


def _check_folder(path: str) -> None:
    """Nobody else can put another file in place of the key file. A folder that is not there is left to the open."""
    folder = os.path.dirname(os.path.abspath(path))
    try:
        found = os.stat(folder)
    except OSError:
        return
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & OTHERS_WRITE:
        raise KeyFileError(
            f"the folder {folder} of the key file may be written by others, so the key is not used",
            hint=f"see that it is yours, then: chmod 700 {folder}",
        )


def _check_file(path: str, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise KeyFileError(f"the key file {path} is not a regular file")
    if found.st_uid != os.geteuid():
        raise KeyFileError(f"the key file {path} belongs to user {found.st_uid}, so it is not used")
    if found.st_mode & OTHERS:
        raise KeyFileError(
            f"the key file {path} has mode {stat.S_IMODE(found.st_mode):04o}, so others may have read it",
            hint=f"expected 0600. If nobody has: chmod 600 {path}; else make a new key: sotbus keys new --replace",
        )


def _parse(path: str, data: bytes) -> KeyPair:
    """The two keys. No word of the content gets into an error."""
    keys: dict[str, str] = {}
    try:
        lines = data.decode("ascii").splitlines() if len(data) <= MAX_FILE_BYTES else []
    except UnicodeDecodeError:
        lines = []
    for line in lines:
        if not line.strip() or line.startswith("#"):
            continue
        name, _, value = (part.strip() for part in line.partition("="))
        key = value[1:-1]
        if name not in ("public", "secret") or name in keys or value != f'"{key}"' or not is_key(key):
            keys.clear()
            break
        keys[name] = key
    if len(keys) != 2:
        raise KeyFileError(
            f'the key file {path} is not one: expected public = "..." and secret = "...", {KEY_CHARACTERS} characters',
            hint="put back a good copy, or make a new key: sotbus keys new --replace",
        )
    return KeyPair(keys["public"], keys["secret"])


def create(path: str, make: Callable[[], KeyPair], *, replace: bool = False) -> str | None:
    """Write a key file, mode 0600, in a folder of mode 0700 where there is none yet.

    :param make: makes the pair, asked only where one is to be written.
    :param replace: put it in the place of the one that is there, which is kept aside; else that one stands.

    Answers the path of the old file, or None where there was none.

    *Durability*: file and folder are synced; a crash leaves the old file or the new one, whole.
    *Errors*: :class:`KeyFileError`; the old file stands then.
    """
    folder = os.path.dirname(os.path.abspath(path))
    temp = f"{path}.tmp.{os.getpid()}.{os.urandom(4).hex()}"
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
        _check_folder(path)
        if os.path.lexists(path) and not replace:
            raise FileExistsError
        pair = make()
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "wb") as file:
                file.write(_text(pair))
                file.flush()
                os.fsync(fd)
            aside = _put(temp, path, replace=replace)
        finally:
            try:
                os.unlink(temp)
            except FileNotFoundError:
                pass
        _sync_folder(folder)
    except FileExistsError:
        raise KeyFileError(
            f"there is a key file {path} already, and nothing was changed",
            hint="'sotbus keys show' shows its public key; --replace makes a new one and keeps the old one aside",
        ) from None
    except OSError as error:
        raise KeyFileError(f"the key file {path} cannot be written: {error.strerror or error}") from None
    return aside


def _put(temp: str, path: str, *, replace: bool) -> str | None:
    """Give the file its name. *Errors*: FileExistsError where one is there and is not to be replaced; OSError."""
    if not replace or not os.path.lexists(path):
        os.link(temp, path)
        return None
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    aside = f"{path}.{stamp}.{os.urandom(2).hex()}.old"
    os.link(path, aside, follow_symlinks=False)
    os.rename(temp, path)
    return aside


def _text(pair: KeyPair) -> bytes:
    return (
        "# The key pair of this node (CURVE, in Z85). Whoever has the secret is this node: show it to nobody.\n"
        f'public = "{pair.public}"\n'
        f'secret = "{pair.secret}"\n'
    ).encode("ascii")


def _sync_folder(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
