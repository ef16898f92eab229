"""The ``zmq`` plugin: links between boxes over ZeroMQ, encrypted and authenticated. Its hooks are in :mod:`.hooks`.

This module imports nothing, and the hooks load ZeroMQ only where a link is to be made: commands that start fast read
them too.
"""
