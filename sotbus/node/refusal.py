"""An error as an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sotbus.errors import SotbusError


def refusal_payload(error: SotbusError) -> dict[str, Any]:
    """An error as the wire says it; a hint goes along for a sotbus client, which prints it on a line of its own."""
    payload: dict[str, Any] = {"error": str(error), "code": error.code}
    if getattr(error, "outcome_unknown", False):
        payload["outcome_unknown"] = True
    if error.hint:
        payload["hint"] = error.hint
    return payload
