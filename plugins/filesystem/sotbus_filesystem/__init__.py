"""The ``filesystem`` plugin: a comm folder on this box's own disk. Its hooks are in :mod:`.hooks`.

This module imports nothing, because a command that must start fast takes only :mod:`.lock_manager`.
"""
