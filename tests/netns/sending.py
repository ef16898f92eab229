"""Many messages through a node while its links fail, and the account of what became of each."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from netns.boxes import Box, end
from netns.sender import FILED, OUTCOMES, UNKNOWN

ENTRY = Path(__file__).with_name("sender.py")

THREADS = 8
"""Messages that one client has in flight."""

ANSWER_S = 5.0
"""Within this a sender has its answer (sot-comm v1, The wire)."""

SLACK_S = 15.0
"""What a machine may add that stands still for seconds."""

COLUMNS = ("fault", "sends", *OUTCOMES, "once", "more than once", "retried", "filed then", "once then", "more then")
"""Of a row: what was answered, what stood on disk before any retry, and the same after each was retried once."""


class Sending:
    """A client process at work; what was answered so far is in ``answers``. It sends what it is given.

    :param pause_s: how long each thread rests after an answer.
    """

    def __init__(self, box: Box, sender: str, pause_s: float = 0.0) -> None:
        self.answers: list[dict[str, Any]] = []
        self._given: list[str] = []
        words = (str(box.socket), box.name, sender, str(THREADS), str(pause_s))
        self._process = subprocess.Popen(
            box.net.words(sys.executable, "-P", str(ENTRY), *words),
            env=box.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __repr__(self) -> str:
        return f"<Sending {len(self.answers)} of {len(self._given)} answered>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin is not None
        end(self._process)
        self._reader.join()
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            for line in answers:
                self.answers.append(json.loads(line))

    def give(self, orders: Iterable[tuple[str, str]]) -> None:
        """Have it send these: message ID and handle of each."""
        assert self._process.stdin is not None
        for name, to in orders:
            self._given.append(name)
            self._process.stdin.write(json.dumps({"id": name, "to": to}) + "\n")
        self._process.stdin.flush()

    @property
    def unanswered(self) -> int:
        return len(self._given) - len(self.answers)

    def wait_for(self, count: int, bound_s: float = 120.0) -> None:
        """Until so many are answered."""
        deadline = time.monotonic() + bound_s
        while len(self.answers) < count:
            assert time.monotonic() < deadline, self
            assert self._reader.is_alive(), self
            time.sleep(0.005)

    def finish(self, bound_s: float = 300.0) -> list[dict[str, Any]]:
        """All the answers, once nothing more is given: one for each message, and none later than a sender waits."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(bound_s) == 0
        self._reader.join()
        assert sorted(one["id"] for one in self.answers) == sorted(self._given)
        late = [one for one in self.answers if one["took_s"] > ANSWER_S + SLACK_S]
        assert not late, late
        return self.answers


def on_disk(mailboxes: Mapping[str, Box], prefix: str) -> Counter[str]:
    """How often each message whose ID begins so is on disk, over all mailboxes.

    :param mailboxes: each handle and the box whose folder has its mailbox.
    """
    found: Counter[str] = Counter()
    for handle, box in mailboxes.items():
        found.update({text: count for text, count in box.texts(handle).items() if text.startswith(prefix)})
    return found


def judge(answers: Sequence[Mapping[str, Any]], found: Mapping[str, int]) -> None:
    """Each answer and each line on disk must fit together, whatever failed meanwhile.

    Every ``filed`` is on disk; each other line belongs to a message that was answered FAILED, outcome unknown; nothing
    is there twice.
    """
    outcome = {one["id"]: one["outcome"] for one in answers}
    assert [name for name, count in found.items() if count != 1] == []
    assert [name for name, said in outcome.items() if said == FILED and name not in found] == []
    assert [(name, outcome[name]) for name in found if outcome[name] not in (FILED, UNKNOWN)] == []


def row(fault: str, answers: Sequence[Mapping[str, Any]], found: Mapping[str, int]) -> list[object]:
    """The first columns of a row."""
    said = Counter(one["outcome"] for one in answers)
    return [fault, len(answers), *(said[outcome] for outcome in OUTCOMES), *once_and_more(found)]


def once_and_more(found: Mapping[str, int]) -> tuple[int, int]:
    return sum(count == 1 for count in found.values()), sum(count > 1 for count in found.values())


def table(rows: Sequence[Sequence[object]]) -> str:
    """Rows under their titles, in columns."""
    lines = [[str(cell) for cell in line] for line in (COLUMNS, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
