"""The two small services that an NFSv3 mount needs beside nfsd: rpcbind, as far as the kernel asks it, and MOUNT.

nfsd and lockd do not start with version 3 unless a port mapper on the loopback accepts their registration (RFC 1833);
this one says yes to everything and keeps nothing: clients name their ports. The MOUNT protocol (RFC 1813, appendix I)
gives a client the file handle of the export's root, which nfsd(7) tells through its file ``filehandle``. Both speak ONC
RPC over TCP (RFC 5531). A call of any other program gets no answer, and its connection is closed.
"""

from __future__ import annotations

import os
import socketserver
import struct
import threading
from typing import NoReturn

RPCBIND_PORT = 111
MOUNT_PORT = 20048
_PORTMAPPER, _MOUNT = 100000, 100005
_MOUNT_MNT = 1
_LAST_FRAGMENT = 1 << 31
_AUTH_SYS = 1
_MAX_HANDLE_BYTES = 64  # NFS3_FHSIZE


def serve(mount_address: str, domain: str, export: str, listening: int) -> NoReturn:
    """Serve both until killed. ``domain`` is nfsd's name for the clients; ``listening`` is closed when both listen."""

    class Connection(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while header := self.rfile.read(4):
                (word,) = struct.unpack(">I", header)
                answer = _answer(self.rfile.read(word & ~_LAST_FRAGMENT), domain, export)
                if answer is None:
                    return
                self.wfile.write(struct.pack(">I", len(answer) | _LAST_FRAGMENT) + answer)

    class Service(socketserver.ThreadingTCPServer):
        allow_reuse_address = True
        daemon_threads = True

    mapper = Service(("127.0.0.1", RPCBIND_PORT), Connection)
    mounts = Service((mount_address, MOUNT_PORT), Connection)
    os.close(listening)
    threading.Thread(target=mapper.serve_forever, daemon=True).start()
    mounts.serve_forever()
    os._exit(0)


def _answer(call: bytes, domain: str, export: str) -> bytes | None:
    xid, _, _, program, _, procedure = struct.unpack_from(">6I", call)
    offset = 24
    for _ in ("credentials", "verifier"):
        (length,) = struct.unpack_from(">I", call, offset + 4)
        offset += 8 + _padded(length)
    accepted = struct.pack(">6I", xid, 1, 0, 0, 0, 0)  # a reply, accepted, no verifier, success
    if procedure == 0:  # every program's procedure 0 asks whether it is there
        return accepted
    if program == _PORTMAPPER:
        return accepted + struct.pack(">I", True)
    if program == _MOUNT and procedure == _MOUNT_MNT:
        handle = _root_handle(domain, export)
        opaque = struct.pack(">I", len(handle)) + handle.ljust(_padded(len(handle)), b"\0")
        return accepted + struct.pack(">I", 0) + opaque + struct.pack(">2I", 1, _AUTH_SYS)
    if program == _MOUNT:  # UMNT and the others of which nobody needs the answer
        return accepted
    return None


def _padded(length: int) -> int:
    return (length + 3) & ~3


def _root_handle(domain: str, export: str) -> bytes:
    fd = os.open("/proc/fs/nfsd/filehandle", os.O_RDWR)
    try:
        os.write(fd, f"{domain} {export} {_MAX_HANDLE_BYTES}\n".encode())
        text = os.read(fd, 4096)
    finally:
        os.close(fd)
    return bytes.fromhex(text.decode().strip().removeprefix("\\x"))
