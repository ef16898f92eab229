"""sotbus: a durable message bus for the sessions people run on lab machines.

The on-disk protocol (sot-comm v1) lives in :mod:`sotbus.comm`, the commands in :mod:`sotbus.cli`, the Python API in
:mod:`sotbus.bus`; its names are here too. This module imports nothing until one of them is used, so that a command
starts fast.
"""

__version__ = "0.1.0"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sotbus.bus import Agent as Agent
    from sotbus.bus import Bus as Bus
    from sotbus.bus import Message as Message
    from sotbus.bus import Receipt as Receipt
    from sotbus.bus import open_bus as open_bus
    from sotbus.errors import SotbusError as SotbusError

_HOMES = {
    "Agent": "sotbus.bus",
    "Bus": "sotbus.bus",
    "Message": "sotbus.bus",
    "Receipt": "sotbus.bus",
    "SotbusError": "sotbus.errors",
    "open_bus": "sotbus.bus",
}
"""Each name of the Python API, and the module that it is imported from when it is first used (PEP 562)."""


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(__import__(home, fromlist=[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
