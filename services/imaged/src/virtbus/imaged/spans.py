"""The interface of `virtbus.bus.client.tracing.span`, and an implementation that does nothing."""

import contextlib
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Spans(Protocol):
    """`virtbus.bus.client.tracing.span`."""

    def __call__(
        self, name: str, *, uid: str = "", parent: str | None = None
    ) -> AbstractContextManager[Any]: ...


def no_span(name: str, *, uid: str = "", parent: str | None = None) -> AbstractContextManager[None]:
    """Do nothing, if tracing is off."""
    del name, uid, parent
    return contextlib.nullcontext()
