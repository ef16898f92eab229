"""Kill an operation with SIGKILL before each of its system calls, one call after the other.

``kill_at_each_call`` runs an operation again and again, each time in a freshly forked child which is traced
(ptrace) and killed at the entry of its n-th system call, n = 1, 2, 3 ... until a run completes.  A call at whose
entry the kill arrives is not executed, so the kills fall before the first call and between each pair of calls.

Only calls that may touch the outside world count; those in ``_IGNORED`` (memory, signals, clocks, thread upkeep)
do not, and neither do fork's and Python's own before and after the operation.  Modules that the operation imports
when it runs add kill points, so import them beforehand.  Calls of other threads count too (in whatever order they
happen); processes started by the operation are not traced, but die at the same moment as the child.

What this does not show: a kill in the middle of one call (half of a large write), and loss of power.

Needs Linux 5.3 (PTRACE_GET_SYSCALL_INFO) on x86_64 or aarch64, and no other tool.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, NoReturn

# Every call that is counted and has a name here: name, number on x86_64, number on aarch64 (- where there is none).
_CALLS = """
read 0 63, write 1 64, open 2 -, close 3 57, stat 4 -, fstat 5 80, lstat 6 -, poll 7 -, lseek 8 62, ioctl 16 29,
pread64 17 67, pwrite64 18 68, readv 19 65, writev 20 66, access 21 -, pipe 22 -, select 23 -, msync 26 227,
dup 32 23, dup2 33 -, nanosleep 35 101, sendfile 40 71, socket 41 198, connect 42 203, accept 43 202,
sendto 44 206, recvfrom 45 207, sendmsg 46 211, recvmsg 47 212, shutdown 48 210, bind 49 200, listen 50 201,
getsockname 51 204, getpeername 52 205, socketpair 53 199, setsockopt 54 208, getsockopt 55 209, fork 57 -,
vfork 58 -, execve 59 221, wait4 61 260, kill 62 129, fcntl 72 25, flock 73 32, fsync 74 82, fdatasync 75 83,
truncate 76 45, ftruncate 77 46, getdents 78 -, getcwd 79 17, chdir 80 49, fchdir 81 50, rename 82 -, mkdir 83 -,
rmdir 84 -, creat 85 -, link 86 -, unlink 87 -, symlink 88 -, readlink 89 -, chmod 90 -, fchmod 91 52, chown 92 -,
fchown 93 55, lchown 94 -, umask 95 166, statfs 137 43, fstatfs 138 44, sync 162 81, setxattr 188 5,
lsetxattr 189 6, fsetxattr 190 7, getxattr 191 8, fgetxattr 193 10, listxattr 194 11, removexattr 197 14,
getdents64 217 61, fadvise64 221 223, clock_nanosleep 230 115, epoll_wait 232 -, epoll_ctl 233 21, waitid 247 95,
inotify_add_watch 254 27, openat 257 56, mkdirat 258 34, fchownat 260 54, newfstatat 262 79, unlinkat 263 35,
renameat 264 38, linkat 265 37, symlinkat 266 36, readlinkat 267 78, fchmodat 268 53, faccessat 269 48,
pselect6 270 72, ppoll 271 73, splice 275 76, sync_file_range 277 84, utimensat 280 88, epoll_pwait 281 22,
fallocate 285 47, accept4 288 242, eventfd2 290 19, epoll_create1 291 20, dup3 292 24, pipe2 293 59,
inotify_init1 294 26, preadv 295 69, pwritev 296 70, syncfs 306 267, renameat2 316 276, memfd_create 319 279,
copy_file_range 326 285, preadv2 327 286, pwritev2 328 287, statx 332 291, pidfd_send_signal 424 424,
io_uring_setup 425 425, io_uring_enter 426 426, pidfd_open 434 434, close_range 436 436, openat2 437 437,
faccessat2 439 439, fchmodat2 452 452
"""

# Calls that are not counted, in the same form.  Any other call counts, under the name "syscall N".
_IGNORED = """
mmap 9 222, mprotect 10 226, munmap 11 215, brk 12 214, mremap 25 216, madvise 28 233, mincore 27 232,
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, sigaltstack 131 132,
sched_yield 24 124, getitimer 36 102, alarm 37 -, setitimer 38 103, getpid 39 172, clone 56 220, exit 60 93,
uname 63 160, gettimeofday 96 169, getrlimit 97 163, getrusage 98 165, sysinfo 99 179, times 100 153, getuid 102 174,
getgid 104 176, geteuid 107 175, getegid 108 177, getppid 110 173, getpgrp 111 -, getgroups 115 158,
getresuid 118 148, getresgid 120 150, getpgid 121 155, getsid 124 156, prctl 157 167, arch_prctl 158 -, gettid 186 178,
time 201 -, futex 202 98, sched_setaffinity 203 122, sched_getaffinity 204 123, set_tid_address 218 96,
restart_syscall 219 128, clock_gettime 228 113, clock_getres 229 114, exit_group 231 94, tgkill 234 131,
set_robust_list 273 99, get_robust_list 274 100, prlimit64 302 261, getcpu 309 168, getrandom 318 278,
membarrier 324 283, rseq 334 293, clone3 435 435
"""

HANG_SECONDS = 30
_TRACEME, _CONT, _SYSCALL, _SETOPTIONS, _GET_SYSCALL_INFO = 0, 7, 24, 0x4200, 0x420E
_SYSGOOD, _CLONE, _EXEC, _EXITKILL = 0x1, 0x8, 0x10, 0x100000  # PTRACE_O_...
_WALL = 0x40000000  # __WALL: wait for threads, too
_ENTRY = 1  # PTRACE_SYSCALL_INFO_ENTRY
_answer_fd: int | None = None  # set in the child only


class KillPoint(NamedTuple):
    """One run of the operation, as told to ``check``."""

    n: int  # the run's number: it was killed at the entry of its n-th counted call
    call: str  # that call's name; "answer" if the call was to give the answer; "end" for the run that completed
    answered: str | None  # the answer, if it had been given before the kill
    status: int  # -SIGKILL, or 0 for the run that completed

    @property
    def killed(self) -> bool:
        return self.status == -signal.SIGKILL

    def __str__(self) -> str:
        given = "no answer" if self.answered is None else f"answered {self.answered!r}"
        return f"{self.n:4} {self.call:16} {given}"


def answer(text: str) -> None:
    """Called within an operation: give an answer before the operation ends (elsewhere this does nothing).

    An operation's result, if it is a str, is given in this way.  Several answers are joined by newlines.
    """
    if _answer_fd is not None:
        os.write(_answer_fd, text.encode() + b"\n")


def kill_at_each_call(
    operation: Callable[[], object],
    *,
    prepare: Callable[[], None],
    check: Callable[[KillPoint], None],
    limit: int = 500,
) -> list[KillPoint]:
    """Run ``prepare()``, the operation in a child, and ``check(point)`` for each kill point, then for a whole run.

    Returns all points in order; the last one, and only that, is the run that was not killed.
    """
    points: list[KillPoint] = []
    while not points or points[-1].killed:
        n = len(points) + 1
        if n > limit + 1:
            raise AssertionError(f"the operation did not complete within {limit} calls; the last was {points[-1].call}")
        prepare()
        points.append(_run(operation, n))
        try:
            check(points[-1])
        except BaseException as error:
            error.add_note(f"at kill point {points[-1]}")
            raise
    return points


def _run(operation: Callable[[], object], n: int) -> KillPoint:
    names = _names()
    sys.stdout.flush()
    sys.stderr.flush()
    answers, answer_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        _child(operation, answer_fd)
    os.close(answer_fd)
    try:
        call, status = _trace(pid, n, names, answer_fd)
        os.set_blocking(answers, False)
        try:
            said = os.read(answers, 1 << 16)
        except BlockingIOError:  # nothing said, and a process that the operation started still holds the pipe
            said = b""
    finally:
        os.close(answers)
    text = said.decode(errors="replace").removesuffix("\n")
    if status != (0 if call is None else -signal.SIGKILL):
        raise AssertionError(f"run {n} of the operation failed with status {status}:\n{text}")
    return KillPoint(n, call or "end", text if said else None, status)


def _child(operation: Callable[[], object], answer_fd: int) -> NoReturn:
    """Run the operation between two SIGSTOPs, which tell the tracer where to start and where to stop counting."""
    global _answer_fd
    status, traced = 1, False
    try:
        gc.disable()
        sys.dont_write_bytecode = True
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
        signal.alarm(HANG_SECONDS)
        _answer_fd = answer_fd
        _ptrace(_TRACEME, 0)
        traced = True
        signal.raise_signal(signal.SIGSTOP)
        result = operation()
        if isinstance(result, str):
            answer(result)
        signal.raise_signal(signal.SIGSTOP)
        status = 0
    except BaseException:
        if traced:
            signal.raise_signal(signal.SIGSTOP)
        answer(traceback.format_exc())
    finally:
        os._exit(status)


def _trace(pid: int, n: int, names: dict[int, str], answer_fd: int) -> tuple[str | None, int]:
    """Follow the child to its end: the name of the call it was killed at, if any, and its exit code or -signal."""
    count, counting, options_set = 0, False, False
    killed_at: str | None = None
    try:
        os.setpgid(pid, pid)  # so that one can wait for its threads, and kill its own children, and nothing else
        while True:
            who, status = os.waitpid(-pid, _WALL)
            if not os.WIFSTOPPED(status):
                if who == pid:
                    return killed_at, os.waitstatus_to_exitcode(status)
                continue  # a thread has ended
            stop, deliver = status >> 8, 0
            if not options_set:
                _ptrace(_SETOPTIONS, pid, 0, _SYSGOOD | _CLONE | _EXEC | _EXITKILL)
                options_set = True
            if stop == signal.SIGSTOP:
                if who == pid:  # the operation starts or has ended; else it is a new thread's first stop
                    counting = not counting
            elif stop == signal.SIGTRAP | 0x80:
                name = _entered(who, names, answer_fd) if counting and not killed_at else None
                if name:
                    count += 1
                    if count == n:
                        killed_at = name
                        os.killpg(pid, signal.SIGKILL)
            elif stop == signal.SIGALRM:
                raise AssertionError(f"run {n} of the operation hung for {HANG_SECONDS} s, after {count} calls")
            elif stop >> 8 == 0:  # a signal, to be delivered; else a mere event (thread started, exec)
                deliver = stop
            with suppress(ProcessLookupError):  # it was killed while it was stopped
                _ptrace(_SYSCALL if counting else _CONT, who, 0, deliver)
    except BaseException:
        _reap(pid)
        raise


def _reap(pid: int) -> None:
    for kill in (os.kill, os.killpg):
        with suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-pid, _WALL)


def _entered(tid: int, names: dict[int, str], answer_fd: int) -> str | None:
    """The name of the call which the stopped thread is about to make; None if it has made one, "" if it is ignored."""
    info = ctypes.create_string_buffer(88)
    try:
        _ptrace(_GET_SYSCALL_INFO, tid, len(info), ctypes.addressof(info))
    except ProcessLookupError:
        return None
    op, number, first_argument = struct.unpack_from("=B23xQQ", info)
    if op != _ENTRY:
        return None
    name = names.get(number, f"syscall {number}")
    return "answer" if name == "write" and first_argument == answer_fd else name


def _names() -> dict[int, str]:
    """System call numbers of this machine with their names, "" for those that are not counted."""
    column = {"x86_64": 1, "aarch64": 2}.get(platform.machine()) if sys.platform == "linux" else None
    if column is None:
        raise OSError(f"kill points: not for {sys.platform} on {platform.machine()}")
    names: dict[int, str] = {}
    for table, counted in ((_CALLS, True), (_IGNORED, False)):
        for row in table.split(","):
            fields = row.split()
            if fields[column] != "-":
                names[int(fields[column])] = fields[0] if counted else ""
    return names


_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def _ptrace(request: int, pid: int, address: int = 0, data: int = 0) -> None:
    if _libc.ptrace(request, pid, address, data) == -1:
        error = ctypes.get_errno()
        raise OSError(error, f"ptrace request {request:#x}: {os.strerror(error)}")
