"""``sotbus list`` and ``sotbus whoami`` (facts 8.5)."""

from __future__ import annotations

import json

from sotbus.cli import options, terminal
from sotbus.cli.main import open_client
from sotbus.comm import reading
from sotbus.comm.liveness import age_s, is_live
from sotbus.comm.registry import entry_of, text_of
from sotbus.errors import NotJoined, RegistryUnreadable, SotbusError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sotbus.comm.box import Box
    from sotbus.comm.client import Client

WIDTHS = (18, 10, 14, 12)
"""Least widths of handle, host, project and liveness; a longer value widens its whole column."""


def run_list(words: list[str], box: Box | None) -> int:
    made = options.parser(
        "list",
        "Who is there: handle, host, project, whether live and for how long not, expertise; below it the work-state.",
        "  sotbus list\n  sotbus list --json | jq 'map(select(.live)) | .[].handle'",
    )
    made.add_argument("--json", action="store_true", help="print one JSON array")
    given = options.parse(made, words)
    if isinstance(given, int):
        return given
    client = open_client(box)
    client.ensure()
    try:
        agents = client.registry.agents()
    except RegistryUnreadable as error:
        return terminal.tell(
            SotbusError("FAILED: the registry could not be read; nothing was listed", hint=error.hint or str(error))
        )
    me = _me(client, agents)
    rows = [_row(client, name, agents, me) for name in agents]
    if given.json:
        terminal.out(json.dumps(rows, ensure_ascii=True))
        return 0
    terminal.out(f"sot-comm agents  ({client.folder.registry}):")
    if not rows:
        terminal.out("  (none)")
    _table(rows)
    return 0


def _me(client: Client, agents: dict[str, Any]) -> str:
    try:
        return client.identity(agents).handle
    except SotbusError:
        return ""


def _row(client: Client, name: str, agents: dict[str, Any], me: str) -> dict[str, Any]:
    """One handle's facts, as ``--json`` prints them. Ages are in whole seconds, null where there is no stamp."""
    entry = entry_of(agents, name)
    now = client.clock()
    last_seen = entry.get("last_seen") if entry else None
    age = age_s(last_seen, now)
    expertise = entry.get("expertise") if entry else None
    return {
        "handle": name,
        "host": text_of(entry, "host"),
        "repo": text_of(entry, "repo"),
        "root": text_of(entry, "root"),
        "live": is_live(last_seen, now),
        "last_seen": text_of(entry, "last_seen"),
        "age_s": age,
        "ahead_s": -age if age is not None and age < 0 else 0,
        "status": text_of(entry, "status"),
        "state": text_of(entry, "state"),
        "summary": text_of(entry, "summary"),
        "state_age_s": age_s(entry.get("status_at") if entry else None, now),
        "expertise": [word for word in expertise if isinstance(word, str)] if isinstance(expertise, list) else [],
        "me": name == me,
    }


def _liveness(row: dict[str, Any]) -> str:
    if row["live"]:
        return f"live ahead {row['ahead_s']}s" if row["ahead_s"] else "live"
    return f"stale {row['age_s']}s" if row["age_s"] is not None else "stale"


def _table(rows: list[dict[str, Any]]) -> None:
    """Columns as wide as their widest value, a second line for the work-state."""
    texts = [("@" + row["handle"], row["host"], row["repo"], _liveness(row)) for row in rows]
    cells = [[terminal.shown(text) for text in line] for line in texts]
    least = (WIDTHS[0] + 1, *WIDTHS[1:])
    widths = [max([least[i], *(len(line[i]) for line in cells)]) for i in range(4)]
    for row, line in zip(rows, cells, strict=True):
        padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        padded[0] = terminal.colour(padded[0], terminal.BOLD)
        padded[3] = terminal.colour(padded[3], terminal.GREEN if row["live"] else terminal.DIM)
        expertise = terminal.shown("/".join(row["expertise"]))
        terminal.out(f"  {' '.join(padded)} [{expertise}]{'  <- me' if row['me'] else ''}")
        state = terminal.shown(row["state"] or "idle")
        summary = f" {terminal.shown(row['summary'])}" if row["summary"] else ""
        age = f" · {_ago(row['state_age_s'])}" if row["state_age_s"] is not None else ""
        terminal.out(f"    [{state}]{summary}{age}")


def _ago(seconds: int) -> str:
    if seconds < 60:
        return "just now"
    if seconds < 3600:
        return f"{seconds // 60}m ago"
    if seconds < 86400:
        return f"{seconds // 3600}h ago"
    return f"{seconds // 86400}d ago"


def run_whoami(words: list[str], box: Box | None) -> int:
    made = options.parser(
        "whoami",
        "Which handle this session has here, in which comm folder, and how it is told apart from other sessions.",
        "  sotbus whoami\n  sotbus whoami --json\n\nexit status: 0 joined, 1 not joined",
    )
    made.add_argument("--json", action="store_true", help="print one JSON object")
    given = options.parse(made, words)
    if isinstance(given, int):
        return given
    client = open_client(box)
    facts: dict[str, Any] = {
        "handle": None,
        "host": client.box.declared_host,
        "project": client.project.root,
        "comm_home": client.folder.root,
        "self_file": client.session.own_path,
        "harness": client.session.harness,
        "row": client.session.row,
    }
    problem: NotJoined | None = None
    try:
        facts.update(_own_facts(client))
    except NotJoined as error:
        problem = error
    if given.json:
        terminal.out(json.dumps(facts, ensure_ascii=True))
    else:
        for name, value in facts.items():
            if value not in (None, ""):
                terminal.out(f"{name.replace('_', ' ') + ':':<12} {terminal.shown(str(value))}")
    return terminal.tell(problem) if problem else 0


def _own_facts(client: Client) -> dict[str, Any]:
    """What is known once the session has a handle. *Errors*: NotJoined."""
    handle = client.identity().handle
    facts: dict[str, Any] = {"handle": handle, "inbox": client.folder.inbox(handle)}
    try:
        entry = entry_of(client.registry.agents(), handle)
        facts["live"] = is_live(entry.get("last_seen"), client.clock()) if entry else False
        facts["listed"] = entry is not None
    except RegistryUnreadable as error:
        terminal.err(f"note: {terminal.shown(str(error))}")
    try:
        facts["unread"] = reading.unread(reading.look_at(client, handle, terminal.err), handle)
    except SotbusError as error:
        terminal.err(f"note: {terminal.shown(str(error))}")
    return facts
