"""The main job in half a minute: two sessions on this box write to each other, and two accidents are survived.

Run by ``make demo``. Everything happens in a temporary folder, which is removed at the end; each command shown is the
real ``sotbus`` command, run in one of two shells that are sessions of their own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from sotbus.comm.box import Box
from sotbus.comm.identity import fresh_read_doubt

END = "__demo_end__"

HOLD = """\
import os, sys, time
from sotbus.comm.box import Box
from sotbus.comm.folder import Folder
from sotbus.comm.registry_lock import RegistryLock
with RegistryLock(Folder.of(os.environ), Box.here(os.environ)).hold(5):
    print("held", flush=True)
    time.sleep(600)
"""


class Shell:
    """A shell that stays open, as a terminal's does: the leader of a session of its own."""

    def __init__(self, name: str, folder: Path, environ: dict[str, str]) -> None:
        self.name = name
        folder.mkdir(parents=True)
        self._process = subprocess.Popen(
            ["/bin/sh"],
            cwd=folder,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, command: str) -> str:
        """Run one command, show it and its output, and answer the output. A failing command ends the demo."""
        print(f"  {self.name} $ {command}", flush=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f'{command} 2>&1 </dev/null; echo "{END}$?"\n')
        self._process.stdin.flush()
        lines: list[str] = []
        for line in self._process.stdout:
            if line.startswith(END):
                status = int(line[len(END) :])
                break
            lines.append(line)
            print(f"  | {line}", end="", flush=True)
        else:
            sys.exit(f"the shell of {self.name} ended early")
        if status != 0:
            sys.exit(f"the command above ended with status {status}")
        return "".join(lines)

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=30)


def say(text: str) -> None:
    print(f"\n{text}", flush=True)


def expect(output: str, *words: str) -> None:
    """The demo shows what happens; it must not praise what did not."""
    for word in words:
        if word not in output:
            sys.exit(f"this should have said {word!r}")


def environment(base: Path) -> dict[str, str]:
    """The user's environment less what would lead elsewhere, with the demo's own folders and ``sotbus`` on the path."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SOT", "XDG_", "TMUX", "CLAUDE"))}
    return kept | {
        "SOT_COMM_HOME": str(base / "comm"),
        "XDG_CONFIG_HOME": str(base / "config"),
        "PATH": os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", os.defpath),
        "NO_COLOR": "1",
    }


def proving_folder() -> str | None:
    """A folder for temporary files on a file system whose reads are proved fresh, None for the usual one."""
    box = Box.here(os.environ)
    for folder in (None, "/dev/shm", "/var/tmp"):
        path = folder or tempfile.gettempdir()
        if os.access(path, os.W_OK) and fresh_read_doubt(path, box) is None:
            return folder
    return None


def torn_inbox(api: Shell, web: Shell, base: Path) -> None:
    say("3. A writer dies in the middle of a line. Here is half a message at the end of web's mailbox:")
    inbox = next((base / "comm" / "inbox").glob("web-*.jsonl"))
    with inbox.open("ab") as file:
        file.write(b'{"from":"api","to":"we')
    web.run(f"tail -c 60 {inbox}; echo")
    say("   Nobody is shown half a message. The next writer cuts the rest off, under the mailbox's lock:")
    expect(api.run(f"sotbus send @{inbox.stem} 'are the docs up to date?'"), "note: cut 22 bytes", "filed")
    say("   The reader sees whole messages only:")
    expect(web.run("sotbus poll"), "are the docs up to date?")


def dead_holder(web: Shell, base: Path, environ: dict[str, str]) -> None:
    say("4. A process takes the registry's lock and is killed with kill -9. Its lock file stays:")
    holder = subprocess.Popen([sys.executable, "-c", HOLD], env=environ, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        expect(holder.stdout.readline(), "held")
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    web.run(f"cat {base}/comm/.registry.lock")
    doubt = fresh_read_doubt(str(base), Box.here(os.environ))
    if doubt is not None:
        print(f"   Here nothing can prove its holder dead ({doubt}), so sotbus would wait for a person.")
        os.unlink(base / "comm" / ".registry.lock")
        return
    say(
        "   No time-out frees it. The next command proves that this very process is dead, settles a second, takes over:"
    )
    expect(web.run("sotbus join --expertise frontend"), "Joined")


def story(base: Path) -> None:
    environ = environment(base)
    api = Shell("api", base / "work" / "api", environ)
    web = Shell("web", base / "work" / "web", environ)
    try:
        say("1. Two sessions, two project folders, one comm folder on this disk. No daemon, no server.")
        api.run("sotbus init >/dev/null && sotbus join")
        web.run("sotbus join")
        listed = web.run("sotbus list")
        expect(listed, "@api-", "@web-", "<- me")
        say("2. They write to each other. 'filed' means that the line is in the mailbox, synced to disk.")
        names = [line.split()[0][1:] for line in listed.splitlines() if line.startswith("  @")]
        to_api, to_web = sorted(names)
        expect(web.run(f"sotbus send @{to_api} 'which port does the service listen on?'"), "filed")
        expect(api.run("sotbus poll"), "which port")
        expect(api.run(f"sotbus send @{to_web} '8080; see docs/ports.md'"), "filed")
        expect(web.run("sotbus poll"), "8080")
        expect(web.run("sotbus poll"), "No new messages.")
        torn_inbox(api, web, base)
        dead_holder(web, base, environ)
        say("5. They leave. Mailboxes stay, so nothing unread is lost.")
        api.run("sotbus leave")
        web.run("sotbus leave")
    finally:
        api.close()
        web.close()


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="sotbus-demo-", dir=proving_folder()) as base:
        story(Path(base))
    say("Done; the temporary folder is gone. 'sotbus --help' shows the commands, README.md the rest.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
