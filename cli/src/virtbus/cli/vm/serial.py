"""A node's streams of serial output: many answers (`ConsoleData`) to one request, in msgpack."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from virtbus.cli.failures import CliError, Exit, unavailable
from virtbus.cli.wire import message as bodies
from virtbus.cli.wire.protocol import Message
from virtbus.cli.wire.session import NOBODY, Session, nobody, refusal_of

FIRST_ANSWER_S = 5.0
_PUMP_S = 0.5
PRESENT_EVERY_S = 10.0
"""The agent ends a stream that it has not heard of for 30 s."""
_STREAM_MS = 3_600_000


class SerialStream:
    """Output of one VM's console or log; `write` gets the bytes as they come."""

    def __init__(self, session: Session, subject: str, write: Callable[[bytes], None]) -> None:
        self._session = session
        self._subject = subject
        self._write = write
        self._heard = False
        self._reply = ""
        self._present_s = time.monotonic()
        self.input_subject = ""
        self.closed = ""
        session.on_reconnect(self._lost)

    def open(self, query: Mapping[str, Any]) -> None:
        """Ask, and wait for the first answer.

        Raises:
            CliError: refused, or the node's agent does not answer.
        """
        self._reply = self._session.inbox(self._receive)
        frame = bodies.envelope(self._subject, self._reply, _STREAM_MS, dict(query))
        headers = {bodies.CONTENT_TYPE: bodies.MSGPACK}
        self._session.publish(
            self._subject, bodies.to_msgpack(frame), reply=self._reply, headers=headers
        )
        deadline = time.monotonic() + FIRST_ANSWER_S
        while not self._heard:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise unavailable("the node's agent does not answer", "see `virtbus status`")
            self._session.pump(left_s)

    def pump(self, also: int | None = None) -> None:
        """Pass on what has come; returns at once when `also` (a fd) can be read.

        It also tells the agent that we are still here, which lets go of who says nothing.
        """
        self._session.pump(_PUMP_S, also)
        now_s = time.monotonic()
        if self.input_subject and now_s - self._present_s > PRESENT_EVERY_S:
            self._present_s = now_s
            self.send(b"")

    def send(self, data: bytes) -> None:
        """Type `data` into the guest."""
        frame = bodies.envelope(self.input_subject, self._reply, None, {"data": data})
        self._session.publish(self.input_subject, bodies.to_msgpack(frame))

    def leave(self) -> None:
        """Tell the agent that nobody listens any more."""
        if self.input_subject and not self.closed:
            frame = bodies.envelope(self.input_subject, self._reply, None, {"closed": "detached"})
            self._session.publish(self.input_subject, bodies.to_msgpack(frame))

    def _lost(self) -> None:
        self.closed = self.closed or "the connection to the bus was lost; attach again"

    def _receive(self, item: Message) -> None:
        refusal = refusal_of(item)
        if refusal is not None:
            raise nobody(self._subject) if refusal.reason == NOBODY else refusal
        self._heard = True
        try:
            value = bodies.read(item.body)
        except bodies.UnreadableError as error:
            raise CliError(Exit.REFUSED, "unreadable", str(error)) from None
        if not isinstance(value, Mapping):
            return
        self.input_subject = str(value.get("input_subject") or self.input_subject)
        data = value.get("data") or b""
        if data:
            self._write(data if isinstance(data, bytes) else str(data).encode())
        self.closed = str(value.get("closed") or self.closed)


def node_subject(view: Mapping[str, Any], verb: str) -> str:
    """`virtbus.node.<node>.rpc.agent.<verb>` of the VM's node; CliError where it has none."""
    node = str(view.get("node") or "_")
    if node == "_":
        name = view.get("name")
        raise CliError(
            Exit.REFUSED,
            "not_placed",
            f"{name} has no node yet, so nothing of it runs",
            hint=f"`virtbus vm get {name}` says what it waits for",
        )
    return f"virtbus.node.{node}.rpc.agent.{verb}"
