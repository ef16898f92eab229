"""``sotbus node``: what this box's node does, on one screen."""

from __future__ import annotations

import json
import os

from sotbus.cli import options, terminal
from sotbus.errors import EX_FAILED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sotbus.comm.box import Box


def run_node(words: list[str], box: Box | None) -> int:
    """Ask the node for its state. Exit 1 where none answers."""
    from sotbus import config as configuration
    from sotbus.comm.box import Box as ThisBox
    from sotbus.comm.daemon import Daemon, NoDaemonError

    made = options.parser(
        "node",
        "Show this box's node: its links, up or why not, round trips, rates, filings by outcome, queue depths.",
        "  sotbus node             one screen\n  sotbus node --json      all of it, for programs",
    )
    made.add_argument("--json", action="store_true", help="print one JSON object")
    given = options.parse(made, words)
    if isinstance(given, int):
        return given
    here = box or ThisBox.here(os.environ)
    config = configuration.load(configuration.find(os.environ, here.declared_host))
    daemon = Daemon.own(os.environ, here.declared_host, configured=config.node_socket)
    try:
        answer = daemon.ask("sotbus.status", {})
    except NoDaemonError as error:
        terminal.err(f"no node answers on this box: {terminal.shown(str(error))}")
        terminal.err("hint: sotbus serve")
        return EX_FAILED
    answer.check()
    status = answer.payload.get("status")
    if not isinstance(status, dict):
        terminal.err("the daemon of this box is not sotbus's: it has no state to show")
        return EX_FAILED
    if given.json:
        terminal.out(json.dumps(status, ensure_ascii=False))
    else:
        for line in lines_of(status):
            terminal.out(line)
    return 0


def lines_of(status: dict[str, Any]) -> list[str]:
    """The screen."""
    shown = terminal.shown
    mail = status["mailboxes"]
    lines = [
        f"node      {shown(status['node'])}, pid {status['pid']}, up {_span(status['up_s'])}",
        f"folder    {shown(status['comm_folder'])} (lock record: {shown(status['record'])})",
        f"socket    {shown(status['socket'])}, {status['clients']} clients{_malformed(status)}",
        f"rows      {', '.join('@' + shown(row) for row in status['rows']) or 'none'}",
        f"filings   {_counts(status['filings'])}; {_rate(status.get('filings_per_s', 0.0))} over the last minute",
        f"mailboxes {mail['depth']} waiting, {mail['lines']} lines in {mail['batches']} batches, "
        f"{mail['syncs']} syncs, longest wait {mail['longest_wait_s'] * 1000:.0f} ms",
    ]
    for handle, box in sorted(status["mailbox"].items()):
        lines.append(f"mailbox   @{shown(handle)}: {box['depth']} waiting, {box['queued_bytes']} bytes")
    lines += _delivery_lines(status)
    turned_away = {what: status["inbound"].get(what, 0) for what in ("malformed", "refused")}
    if any(turned_away.values()):
        lines.append(f"inbound   {_counts(turned_away)} of {status['inbound'].get('requests', 0)} requests of peers")
    if not status["links"]:
        lines.append("links     none")
    for link in status["links"]:
        if link["up"]:
            trip = f", round trip {link['round_trip_s'] * 1000:.1f} ms" if link["round_trip_s"] is not None else ""
            rates = f"{_rate(link.get('asked_per_s', 0.0))} asked, {_rate(link.get('taken_per_s', 0.0))} taken"
            state = terminal.colour("up", terminal.GREEN) + f" for {_span(link['up_s'])}{trip}, {rates}"
        else:
            state = terminal.colour("down", terminal.RED) + (f", {shown(link['why'])}" if link.get("why") else "")
        where = f" at {shown(link['address'])}" if link["address"] else ", dials in"
        lines.append(f"link      {shown(link['node'])} ({link['role']}{where}): {state}")
    return lines


def _delivery_lines(status: dict[str, Any]) -> list[str]:
    """Where each delivery listens on the network, whether it ended and was started again, and what it turned away.

    A plugin tells of itself what it likes, so nothing is taken for granted here.
    """
    lines = []
    restarts = status.get("restarts", {})
    told_by = status.get("deliveries", {})
    for name in sorted(restarts | told_by):
        told = told_by.get(name, {})
        transport = told.get("transport")
        transport = transport if isinstance(transport, dict) else {}
        listening, refused, peers = (transport.get(key) for key in ("listening", "refused", "peers"))
        said = [f"listening on {terminal.shown(str(listening))}"] if listening else []
        if restarts.get(name):
            again = f"ended and was started again {restarts[name]} times"
            if listening:
                said.append(again)
            else:
                said.append(terminal.colour(f"not listening, {again}", terminal.RED))
                said.append("the error is in its events: delivery ended")
        if isinstance(refused, dict) and any(refused.values()):
            said.append(f"refused handshakes: {_counts(refused)}")
        said += [
            f"{one['malformed']} malformed from {terminal.shown(str(one.get('name')))}"
            for one in (peers if isinstance(peers, (list, tuple)) else ())
            if isinstance(one, dict) and one.get("malformed")
        ]
        if said or told.get("malformed"):
            lines.append(f"delivery  {terminal.shown(name)}: {'; '.join(said) or 'runs'}{_malformed(told)}")
    return lines


def _malformed(counts: dict[str, Any]) -> str:
    """How much came that could not be read; ``""`` for nothing."""
    return f", {counts['malformed']} malformed" if counts.get("malformed") else ""


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {terminal.shown(outcome)}" for outcome, count in sorted(counts.items())) or "none"


def _rate(per_s: float) -> str:
    """A rate that can be read, also where it is far below one a second."""
    return f"{per_s:.1f}/s" if per_s >= 1 or per_s == 0 else f"{per_s * 60:.1f}/min"


def _span(seconds: float) -> str:
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60}s"
    return f"{whole // 3600}h {whole % 3600 // 60}m"
