"""What several of these tests need."""

from typing import Any

import pytest

from project.survive.nonfinite import NonFinite


@pytest.fixture
def late(monkeypatch):
    """As on a GPU: the flag is read later."""
    begin = NonFinite.on_train_start

    def begin_late(self: Any, *args: Any) -> None:
        begin(self, *args)
        self._late = True

    monkeypatch.setattr(NonFinite, "on_train_start", begin_late)
