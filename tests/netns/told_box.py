"""The ``sotbus`` command, its node too, on a box whose mounts and machine id the test tells.

``TEST_MOUNTINFO`` and ``TEST_MACHINE_ID`` say what another machine's kernel would: boxes of one test share a kernel. A
node reads its box afresh whenever it makes a client, so the reading itself is replaced.
"""

import os
import sys
from collections.abc import Mapping

from sotbus.cli.main import main
from sotbus.comm.box import Box

_here = Box.here


def told(environ: Mapping[str, str], configured_machine_id: str | None = None) -> Box:
    box = _here(environ, configured_machine_id)
    box.mountinfo_path = os.environ["TEST_MOUNTINFO"]
    box.machine_id = os.environ["TEST_MACHINE_ID"]
    return box


if __name__ == "__main__":
    Box.here = told  # type: ignore[method-assign]
    sys.exit(main())
