"""sotbus: a durable message bus for the sessions people run on lab machines.

The on-disk protocol (sot-comm v1) lives in :mod:`sotbus.comm`, the commands in :mod:`sotbus.cli`.
This module imports nothing, so that a command starts fast.
"""

__version__ = "0.1.0"
