"""One tree of errors. Each has a ``code`` (a stable word), an ``exit_status``, and a text that says what was wrong.

``str(error)`` is the page's own wording where the page has one. A remedy that is not part of the page's words is kept
apart in ``hint`` (decisions, sot-comm 20), so that a surface can print it on a line of its own.
"""

from __future__ import annotations

EX_FAILED = 1
EX_USAGE = 2
EX_SLOT = 3
EX_TRY_AGAIN = 75  # sysexits.h EX_TEMPFAIL


class SotbusError(Exception):
    """Base of every error that sotbus raises on purpose.

    ``code`` is stable and for programs, the text is for people, ``hint`` is a remedy or ``""``.
    """

    code = "internal"
    exit_status = EX_FAILED

    def __init__(self, text: str, *, hint: str = "") -> None:
        super().__init__(text)
        self.hint = hint


class UsageError(SotbusError):
    """The command line itself is wrong; nothing was looked at."""

    code = "usage"
    exit_status = EX_USAGE


class BadRequest(SotbusError):
    """An input can never be right: text that is not Unicode, an empty text, a setting of the wrong type."""

    code = "bad_request"


class BadHandle(SotbusError):
    """A name breaks the handle rule (sot-comm v1, Handles)."""

    code = "bad_handle"


class TooLarge(SotbusError):
    """A text is over the configured bound; both numbers are in the text."""

    code = "too_large"


class ConfigError(BadRequest):
    """The configuration file cannot be used; the text names file, table, key and what was expected."""


class FolderError(SotbusError):
    """The comm folder cannot be made or used."""

    code = "file_failed"


class RegistryUnreadable(SotbusError):
    """No good read of registry.json within its tries. Never the same as "absent" (sot-comm v1, registry.json)."""

    code = "file_failed"


class RegistryWriteFailed(SotbusError):
    """A registry write failed at some step; nothing was written."""

    code = "file_failed"


class RegistryLockFailed(RegistryWriteFailed):
    """The registry lock was not taken within its bound; the text names the holder and the recovery."""


class NotJoined(SotbusError):
    """This session has no handle, or one that it may not use."""

    code = "not_joined"


class GateRefused(NotJoined):
    """Another agent runs between this process and the session whose identity it was handed (agent gate)."""

    code = "op_denied"


class SlotTaken(SotbusError):
    """A join would take a slot or a handle that belongs to another session; nothing was written."""

    code = "held_by_row"
    exit_status = EX_SLOT


class NotHere(SotbusError):
    """No box knows the handle."""

    code = "not_here"


class NoLiveSession(SotbusError):
    """The handle is listed and nobody runs it."""

    code = "no_live_session"


class FilingFailed(SotbusError):
    """The line was not filed: the file's length is what it was, unless ``outcome_unknown``.

    ``outcome_unknown`` is true only where the cut back failed too, so that the line may stand.
    """

    code = "file_failed"

    def __init__(self, text: str, *, hint: str = "", outcome_unknown: bool = False) -> None:
        super().__init__(text, hint=hint)
        self.outcome_unknown = outcome_unknown


class CannotAppend(FilingFailed):
    """This process may not append to the folder's mailboxes itself: the folder's lock record names another manager."""


class MountHung(SotbusError):
    """A file system did not answer within its bound (a hard NFS mount whose server is away); what was asked for is left
    to its thread.

    ``outcome_unknown`` says that it had begun, so that it may be done all the same.
    """

    code = "timeout"

    def __init__(self, text: str, *, hint: str = "", outcome_unknown: bool = False) -> None:
        super().__init__(text, hint=hint)
        self.outcome_unknown = outcome_unknown


class InboxLockHeld(FilingFailed):
    """The inbox lock was held past the bound; nothing was appended."""


class InboxBusy(SotbusError):
    """A reader found the inbox being written past its bound; nothing was read and the cursor stands."""

    code = "busy"
    exit_status = EX_TRY_AGAIN


class Busy(SotbusError):
    """As much is under way as may be; nothing was done, and it may be tried again."""

    code = "busy"
    exit_status = EX_TRY_AGAIN


class Refused(SotbusError):
    """Another node's or daemon's refusal, in its own words and under its own code.

    ``outcome_unknown`` says that it may have been done all the same.
    """

    def __init__(self, text: str, code: str, *, outcome_unknown: bool = False) -> None:
        super().__init__(text)
        self.code = code
        self.outcome_unknown = outcome_unknown


class NeedsNode(SotbusError):
    """The request needs this box's node, and none can be reached."""

    code = "unavailable"


class PluginError(SotbusError):
    """A plugin cannot be loaded, or raised what its contract does not allow; the text names it and its distribution."""

    code = "internal"
