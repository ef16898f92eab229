"""What `sotbus.testing` is to an author: public names, and fakes that need no pytest."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sotbus import contracts, testing


def modules_after(code: str) -> set[str]:
    """What a fresh interpreter has loaded after some code."""
    script = f"import sys\n{code}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("name", testing.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(testing, name).__name__ == name
    assert name in dir(testing)


def test_another_name_is_not_there() -> None:
    with pytest.raises(AttributeError, match="no 'FakeNode'"):
        testing.__getattr__("FakeNode")


def test_fakes_are_imported_without_pytest() -> None:
    fakes = ", ".join(name for name in testing.__all__ if name.startswith("Fake"))
    assert "pytest" not in modules_after(f"from sotbus.testing import {fakes}")


def test_the_fake_lock_manager_is_imported_without_trio() -> None:
    assert "trio" not in modules_after("from sotbus.testing import FakeLockManager; FakeLockManager()")


def test_every_protocol_of_a_plugin_has_a_suite_and_a_fake() -> None:
    protocols = {name for name, one in vars(contracts).items() if getattr(one, "_is_protocol", False)} - {"Protocol"}
    assert {f"Fake{name}" for name in protocols} <= set(testing.__all__)
    assert {f"{name}Contract" for name in protocols - {"Inbound"}} <= set(testing.__all__)
