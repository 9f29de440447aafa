"""Reports stored events, then new events, each event once."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from virtbus.cli.invocation import Invocation
from virtbus.cli.wire import message as bodies
from virtbus.cli.wire.protocol import WireMessage

_PUMP_S = 1.0
_REMEMBERED = 4096
_SPANS = ".trace.span"
"""End of the subjects of trace spans. People do not read trace spans."""
Tell = Callable[[Mapping[str, Any]], None]


class LiveEvents:
    """Subscribes to new events in the constructor.

    Construct it before you read the history. A later subscription would miss the events between the
    reading and the subscription.
    """

    def __init__(self, invocation: Invocation, subject: str, tell: Tell) -> None:
        self._session = invocation.session
        self._tell = tell
        self._shown: deque[tuple[object, ...]] = deque(maxlen=_REMEMBERED)
        self._waiting: list[Mapping[str, Any]] | None = []
        self._session.subscribe(subject, self._receive)

    def follow(self, stored: Iterable[Mapping[str, Any]]) -> None:
        """Pass the stored events, then the events since the subscription, to `tell`.

        This call runs until interrupted.
        """
        early, self._waiting = self._waiting or [], None
        for item in (*stored, *early):
            self._once(item)
        while True:
            self._session.pump(_PUMP_S)

    def _receive(self, message: WireMessage) -> None:
        if message.subject.endswith(_SPANS):
            return
        try:
            data = bodies.data_of(message.body)
        except bodies.UndecodableError:
            return
        if not isinstance(data, Mapping):
            return
        item = {"subject": message.subject, "data": dict(data)}
        if self._waiting is not None:
            self._waiting.append(item)
        else:
            self._once(item)

    def _once(self, item: Mapping[str, Any]) -> None:
        data = item.get("data") or {}
        identity = (item.get("subject"), data.get("at_ns"), data.get("message"))
        if identity not in self._shown:
            self._shown.append(identity)
            self._tell(item)
