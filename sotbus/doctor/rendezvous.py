"""How two runs of ``sotbus doctor --peer`` find each other, among the words on the board (:mod:`.peer_board`).

Of two runs the one with the lower id asks, the other accepts one of those that ask, and the first confirms one of
those that accept. Only a run that lives answers to an id, so files that a dead one left pair with nobody, and a run
that comes third finds both taken.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict

from sotbus.comm.holder import DEAD, judge, parse
from sotbus.doctor.check import some
from sotbus.doctor.peer_board import FORM, Board, Party, Run

LOOK_S = 0.1
"""How often a run that waits for another one lists the folder."""

PROMISE_S = 15.0
"""How long a run that accepted waits to be confirmed: as long as a busy box may take to list the folder once."""


class Alone(Exception):
    """Nobody came to pair with: the text says who was seen, ``remedy`` what to do."""

    def __init__(self, text: str, remedy: str) -> None:
        super().__init__(text)
        self.remedy = remedy


class Meeting:
    """This run's search for a partner on another box.

    :param tell: told what a person should know while they wait.
    """

    def __init__(self, board: Board, mine: Party, tell: Callable[[str], None]) -> None:
        self.board = board
        self.mine = mine
        self.tell = tell
        self._asked: dict[str, int] = {}  # how often each had withdrawn by then
        self._let_go: dict[str, int] = {}  # how much each had said by then
        self._seen: dict[str, tuple[Run, Party]] = {}
        self._promised: Run | None = None
        self._promised_until = 0.0
        self._told: set[str] = set()

    def __repr__(self) -> str:
        return f"<Meeting of {self.mine.host}, promised to {self._promised}>"

    def meet(self, wait_s: float) -> Run:
        """The partner; the run with the lower id is the first of the two.

        :param wait_s: how long to wait for one, in seconds.

        *Errors*: :class:`Alone`, OSError, :class:`Stopped`.
        """
        deadline = time.monotonic() + wait_s
        self.board.post("hello", **asdict(self.mine))
        while True:
            self.board.look()
            partner = self._confirmed() if self._promised is not None else self._next()
            if partner is not None:
                self.board.post("pair", to=_id(partner))
                self.board.keep()
                return partner
            if self._promised is None and time.monotonic() >= deadline:
                raise self._alone(wait_s)
            self.board.pulse.pause(LOOK_S)

    def _confirmed(self) -> Run | None:
        """The run that this one accepted, once it confirms. One that took another, or says nothing more, is let go."""
        run = self._promised
        assert run is not None
        if run.partner == self.mine.id:
            return run
        if time.monotonic() >= self._promised_until:
            self.board.post("withdraw", to=_id(run))
            self._let_go[_id(run)] = len(run.messages)
        elif not run.gone and not run.partner:
            return None
        self._promised = None
        return None

    def _next(self) -> Run | None:
        """Ask whom this run is to ask, accept one that asks it, or answer the one that accepted it."""
        me = self.mine.id
        for run in self._candidates():
            other = _id(run)
            if other < me:
                if run.partner == me:  # it confirmed just as this run withdrew
                    return run
                if run.count("ask", me) and len(run.messages) > self._let_go.get(other, 0):
                    self.board.post("accept", to=other)
                    self._promised, self._promised_until = run, time.monotonic() + PROMISE_S
                    return None
            elif run.count("accept", me) > (withdrawn := run.count("withdraw", me)):
                return run
            elif self._asked.get(other, -1) < withdrawn:
                self.board.post("ask", to=other)
                self._asked[other] = withdrawn
        return None

    def _candidates(self) -> list[Run]:
        """The runs that may be the partner, the lowest id first; what a dead run of this box left is removed."""
        me = parse(self.mine.record)
        found = []
        for run in [*self.board.runs.values()]:
            party = run.party
            if party is None:
                continue
            if me is not None and judge(parse(party.record), me)[0] == DEAD:
                self.board.sweep(party.id)
                continue
            self._seen[party.id] = run, party
            if party.is_on_the_box_of(self.mine):
                self._tell_once(
                    party.id, f"{_on_this_box(party)}; run it on the other box: sotbus doctor --probe --peer"
                )
            elif party.form == FORM and run.partner in ("", self.mine.id):
                found.append(run)
        return sorted(found, key=_id)

    def _tell_once(self, about: str, text: str) -> None:
        if about not in self._told:
            self._told.add(about)
            self.tell(text)

    def _alone(self, wait_s: float) -> Alone:
        """Why there was nobody to pair with, by all that were seen meanwhile."""
        here = [party for _, party in self._seen.values() if party.is_on_the_box_of(self.mine)]
        strange = [party for _, party in self._seen.values() if party.form != FORM]
        others = [(run, party) for run, party in self._seen.values() if party not in here and party not in strange]
        busy = [party.host for run, party in others if run.partner]
        silent = [f"{party.host} pid {party.pid}" for run, party in others if not run.partner and not run.gone]
        run_there = "run it on the other box at the same time: sotbus doctor --probe --peer"
        if strange:
            return Alone(
                f"{strange[0].host} runs sotbus {strange[0].version}, whose probe speaks another form than this box's, "
                f"{self.mine.version}",
                "install one version of sotbus on both boxes, then run it again on both",
            )
        if here:
            return Alone(_on_this_box(here[0]), run_there)
        text = f"no other box came within {wait_s:g}s"
        if busy:
            text += f"; these are paired with one another: {some(sorted(busy))}"
        if silent:
            text += f"; these left files and do not answer: {some(sorted(silent))}"
        return Alone(
            text, f"{run_there}, on a comm folder that is this same one ({os.path.dirname(self.board.folder)})"
        )


def _id(run: Run) -> str:
    return run.stem.rpartition("-")[2]


def _on_this_box(party: Party) -> str:
    return (
        f"the other run is on this same box ({party.host} pid {party.pid}: one machine id, one boot id), and one box "
        "cannot show what two do"
    )
