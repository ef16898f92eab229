"""``python -m sotbus`` is the ``sotbus`` command."""

import sys

from sotbus.cli.main import main

sys.exit(main())
