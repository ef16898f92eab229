"""What the host holds of a call or a command that runs in a box: its notes, its output, its end."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable
from typing import Any

from lab.machine import LabError, Message

DEFAULT_TIMEOUT_S = 60.0


class RemoteError(Exception):
    """An exception that ended a call in a box. ``kind`` is its class's name, ``errno`` an OSError's number."""

    def __init__(self, kind: str, text: str, errno: int | None, traceback: str) -> None:
        super().__init__(f"{kind}: {text}\n\nin the box:\n{traceback}")
        self.kind, self.text, self.errno, self.traceback = kind, text, errno, traceback


class Died(LabError):
    """A call ended without a result: it was killed, or its box was."""


class TooLate(LabError):
    """A bound passed; what was waited for goes on unless the text says otherwise."""


class Job:
    """A child of a box's driver, a session and process group of its own."""

    def __init__(self, title: str, send: Callable[[Message], None]) -> None:
        self.title, self._send = title, send
        self.notes: list[Any] = []
        """All that the call has yielded so far."""
        self.out, self.err = b"", b""
        self.exit: int | None = None
        """The exit status, or minus the signal that killed it; None while it runs."""
        self._pid: int | None = None
        self._result: Message = {}
        self._error: RemoteError | None = None
        self._lost = False
        self._changed = threading.Condition()
        self._next_note, self._next_byte = 0, 0

    def __repr__(self) -> str:
        state = "running" if not self.ended else f"ended with {self.exit}"
        return f"<{self.title}, pid {self._pid}, {state}, {len(self.notes)} notes>"

    def heard(self, message: Message) -> None:
        """A line of the driver about this job; in the machine's thread."""
        with self._changed:
            match message:
                case {"note": value}:
                    self.notes.append(value)
                case {"result": _}:
                    self._result = message
                case {"error": {"kind": str(kind), "text": str(text), "errno": number, "traceback": str(trace)}}:
                    self._error = RemoteError(kind, text, number if isinstance(number, int) else None, trace)
                case {"out": str(data)}:
                    self.out += data.encode("latin-1")
                case {"err": str(data)}:
                    self.err += data.encode("latin-1")
                case {"exit": int(status)}:
                    self.exit = status
                case {"pid": int(pid)}:
                    self._pid = pid
            self._changed.notify_all()

    def lose(self) -> None:
        """Its box, or the guest, is gone."""
        with self._changed:
            self._lost = True
            self._changed.notify_all()

    @property
    def ended(self) -> bool:
        return self.exit is not None or self._lost

    @property
    def pid(self) -> int:
        """Its pid in the box."""
        self._wait(lambda: self._pid is not None or self.ended, DEFAULT_TIMEOUT_S, "its pid")
        if self._pid is None:
            raise Died(f"{self.title}: it was never started")
        return self._pid

    def note(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
        """The next note, in order.

        *Errors*: `TooLate`; when it has ended and told all its notes, what `result` raises, or `Died`.
        """
        self._wait(lambda: len(self.notes) > self._next_note or self.ended, timeout_s, "a note")
        if len(self.notes) > self._next_note:
            self._next_note += 1
            return self.notes[self._next_note - 1]
        self.result(timeout_s)
        raise Died(f"{self.title}: it has ended, and has no more notes")

    def readline(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> str:
        """The next line of standard output, newline included; "" at its end. *Errors*: `TooLate`."""
        self._wait(lambda: b"\n" in self.out[self._next_byte :] or self.ended, timeout_s, "a line of its output")
        start = self._next_byte
        newline = self.out.find(b"\n", start)
        self._next_byte = newline + 1 if newline >= 0 else len(self.out)
        return self.out[start : self._next_byte].decode()

    def send(self, text: str) -> None:
        """Write to its standard input."""
        for start in range(0, len(text), 10_000):
            data = text[start : start + 10_000].encode().decode("latin-1")
            self._send({"op": "input", "data": data})

    def close_input(self) -> None:
        self._send({"op": "close"})

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """A signal to its process group; nothing when it has ended. Returns before it has arrived."""
        self._send({"op": "signal", "signal": int(number)})

    def wait(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> int | None:
        """Until it has ended: `exit`, which is None when its box went down under it. *Errors*: `TooLate`."""
        self._wait(lambda: self.ended, timeout_s, "its end")
        return self.exit

    def result(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
        """A call's result, waited for.

        *Errors*: `RemoteError` for an exception in it, `Died` when it was killed, `TooLate`: it is killed then.
        """
        status = self._end(timeout_s)
        if "result" not in self._result:
            raise Died(f"{self.title}: it ended with {status} before it had a result\n{self._said()}".rstrip())
        return self._result["result"]

    def completed(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        """A command's end, waited for. *Errors*: as `result`; `RemoteError` when it could not be started."""
        status = self._end(timeout_s)
        return subprocess.CompletedProcess(self.title, status, self.out.decode(), self.err.decode())

    def _end(self, timeout_s: float) -> int:
        try:
            status = self.wait(timeout_s)
        except TooLate:
            self.kill()
            raise
        if self._error is not None:
            raise self._error
        if status is None and "result" not in self._result:
            raise Died(f"{self.title}: its box went down\n{self._said()}".rstrip())
        return status or 0

    def _said(self) -> str:
        return self.err.decode(errors="replace")

    def _wait(self, reached: Callable[[], bool], timeout_s: float, what: str) -> None:
        with self._changed:
            if not self._changed.wait_for(reached, timeout_s):
                raise TooLate(f"{self.title}: no sign of {what} in {timeout_s:g} s ({self!r})\n{self._said()}".rstrip())
