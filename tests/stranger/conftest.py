"""The tests in ``tests`` are of the installed package; where it is not installed, there is nothing to collect."""

from __future__ import annotations

import importlib.util

collect_ignore = [] if importlib.util.find_spec("sotbus_stranger") else ["tests"]
