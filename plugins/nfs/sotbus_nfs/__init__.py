"""The ``nfs`` plugin: a comm folder on an NFS v4 mount that several boxes share. Its hooks are in :mod:`.hooks`.

This module imports nothing, because a command that must start fast takes only :mod:`.lock_manager`.
"""
