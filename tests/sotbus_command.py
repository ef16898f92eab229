"""The ``sotbus`` command on a machine whose mounts and id the test tells (``TEST_MOUNTINFO``, ``TEST_MACHINE_ID``)."""

import os
import sys

from sotbus.cli.main import main
from sotbus.comm.box import Box

box = Box.here(os.environ)
box.mountinfo_path = os.environ["TEST_MOUNTINFO"]
box.machine_id = os.environ.get("TEST_MACHINE_ID") or None
sys.exit(main(box=box))
