"""Many lines for one inbox under one lock hold: one write, one sync, and what is left of a batch that fails.

Sources: decisions, Filing once and A batch that fails; facts 5 (append).
"""

from __future__ import annotations

import fcntl
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sotbus.comm.inbox import Inbox


class Batch:
    """Lines that :meth:`sotbus.comm.inbox.Inbox.append` files together: ``inbox.append(Batch(choose), bound_s)``.

    :param choose: answers the lines, each with its newline. Called once, under the lock, after a torn tail is cut and
        before anything is written, with the offset at which the first line will begin: so it can note what is about to
        be written where, leave out what has come too late, and take in what has come meanwhile. None at all is no
        error. Whatever it raises fails the append, and nothing is written.

    ``lines`` is what it chose; ``syncs`` counts the system's syncs that were asked for, a new inbox's folder's too.

    *Durability*: when the append returns, all lines are whole on disk, in this order.
    *Errors*: as of one line, for all of them alike: filed is none, or ``outcome_unknown`` is set. It is set for each
    line, since what a call that failed has written cannot be told. Where it is not set the file has its length before,
    and at most one bare newline for each line but one.
    """

    __slots__ = ("_choose", "lines", "syncs")

    def __init__(self, choose: Callable[[int], Sequence[bytes]]) -> None:
        self._choose = choose
        self.lines: Sequence[bytes] = ()
        self.syncs = 0

    def __repr__(self) -> str:
        return f"<Batch of {len(self.lines)} lines>"

    def under_lock(self, inbox: Inbox, fd: int, length: int, leased: bool) -> None:
        """Choose, write and sync; called by the append."""
        self.lines = lines = self._choose(length)
        if lines:
            self.syncs = 2 if length == 0 else 1
            inbox.write(fd, length, b"".join(lines), leased, len(lines) - 1)


def take_back(fd: int, length: int, blanks: int) -> None:
    """Cut a file back to its length before a batch that failed, plus so many newlines, one less than the batch's lines.

    A reader without the lock may have counted some of the lines that go. The last of these is a blank then, which does
    not hash as it did, so that the reader steps back onto it and goes on with what is filed next. Of the batch's last
    line there is no blank, since a hashed count one past the end is the end. The blanks take no room that the batch had
    not got: where it wrote fewer bytes than that, it wrote no line that could be counted.

    *Durability*: the blanks are synced as far as the disk lets them.
    *Errors*: OSError: some of the batch may stand. Blanks that cannot be written are no error: the file is cut back
    before them.
    """
    blanks = min(blanks, max(0, os.lseek(fd, 0, os.SEEK_END) - length))
    os.ftruncate(fd, length + blanks)
    done = 0
    try:
        write_where_told(fd)
        while done < blanks:
            done += os.pwrite(fd, b"\n" * (blanks - done), length + done)
    except OSError:
        os.ftruncate(fd, length + done)
    try:
        os.fdatasync(fd)
    except OSError:
        return  # as for one line: the cut itself is not promised to outlive a power loss


def write_where_told(fd: int) -> None:
    """Make pwrite(2) write where it is told: on Linux, of a file open for appending, it writes at the end (BUGS there).

    *Errors*: OSError.
    """
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_APPEND)
