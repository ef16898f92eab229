"""A plugin of sotbus by somebody else. Its hooks are in :mod:`.hooks`."""
