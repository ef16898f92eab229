"""Each contract test fails on what breaks its promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from contract.broken import BROKEN, NODES

HERE = Path(__file__).parent


def test_every_broken_implementation_is_found_by_the_test_for_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "--tb=no", f"--basetemp={tmp_path / 'base'}"]
    nodes = [f"{HERE / 'broken.py'}::{node}" for node in NODES]
    done = subprocess.run(
        [*command, *nodes], cwd=HERE.parents[1], capture_output=True, text=True, timeout=240, check=False
    )
    failed = set(re.findall(r"^FAILED \S*broken\.py::(.*?)(?: - .*)?$", done.stdout, re.MULTILINE))
    assert [node for node in NODES if node not in failed] == [], done.stdout + done.stderr
    assert done.returncode == 1
    assert len(failed) == len(set(NODES)) == sum(map(len, BROKEN.values()))
