"""An error's remedy is not lost where a plugin's error is renamed."""

from __future__ import annotations

import pytest

from sotbus.errors import BadRequest
from sotbus.guards import hint_of


@pytest.mark.parametrize(
    ("error", "hint"),
    [(BadRequest("no key", hint="make one"), "make one"), (BadRequest("no key"), ""), (OSError(), "")],
)
def test_an_error_of_ours_has_its_hint_and_no_other_has_one(error: Exception, hint: str) -> None:
    assert hint_of(error) == hint
