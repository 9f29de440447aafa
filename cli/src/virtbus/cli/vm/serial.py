"""Opens streams of a node (console, log, picture, export; ADR 0023) over the CLI's NATS client.

`virtbus.bus.client.streams` implements the same protocol for programs with an event loop.
"""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from virtbus.bus.client.flow_control import (
    KEEP_ALIVE_S,
    SILENT_S,
    WINDOW_BYTES,
    BrokenStreamError,
    FlowControl,
)
from virtbus.bus.client.message_format import CONTENT_TYPE, MSGPACK
from virtbus.cli.failures import CliError, Exit, unavailable
from virtbus.cli.wire import message as bodies
from virtbus.cli.wire.protocol import WireMessage
from virtbus.cli.wire.session import MAX_TIMEOUT_MS, NOBODY, Session, nobody, refusal_of

FIRST_ANSWER_S = 5.0
_PUMP_S = 0.5


class SerialStream:
    """A stream of one VM or export. `write` gets its bytes, `note` gets remarks for the user.

    While `write` blocks, the agent sends at most WINDOW_BYTES. `closed` is the reason of the
    stream's end, and empty before it.
    """

    def __init__(
        self,
        session: Session,
        subject: str,
        write: Callable[[bytes], None],
        note: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self._session = session
        self._subject = subject
        self._write = write
        self._note = note
        self._flow = FlowControl(WINDOW_BYTES)
        self._heard = False
        self._reply = ""
        self._present_s = self._heard_s = time.monotonic()
        self.input_subject = ""
        self.closed = ""
        session.on_reconnect(self._lost)

    def open(self, query: Mapping[str, Any]) -> None:
        """Open the stream, and wait for the first answer.

        Raises:
            CliError: the stream was refused, or the node's agent does not answer.
        """
        self._reply = self._session.inbox(self._receive)
        asked = {**query, "window": WINDOW_BYTES, "owner": owner()}
        frame = bodies.envelope(self._subject, self._reply, MAX_TIMEOUT_MS, asked)
        headers = {CONTENT_TYPE: MSGPACK}
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
        """Process messages for `_PUMP_S`, or until the file descriptor `also` is readable.

        Also send keep-alives: without keep-alives the agent closes the stream.
        """
        self._session.pump(_PUMP_S, also)
        now_s = time.monotonic()
        if self.input_subject and now_s - self._present_s > KEEP_ALIVE_S:
            self._present_s = now_s
            self._say({"upto": self._flow.upto})
        if now_s - self._heard_s > SILENT_S:
            self.closed = self.closed or "the node's agent went silent; attach again"

    def send(self, data: bytes) -> None:
        """Send `data` to the guest; wait while the window is full."""
        while data and not self.closed:
            room = max(0, self._flow.room)
            piece, data = data[:room], data[room:]
            if piece:
                self._say({"data": piece, "at": self._flow.sending(len(piece))})
            else:
                self.pump()

    def read_to_end(self, query: Mapping[str, Any]) -> str:
        """Open the stream, read it to the end, and return the end's reason. Raises as `open`."""
        try:
            self.open(query)
            while not self.closed:
                self.pump()
        finally:
            self.leave()
        return self.closed

    def leave(self) -> None:
        if self.input_subject and not self.closed:
            self._say({"closed": "detached"})

    def _say(self, message: dict[str, Any]) -> None:
        frame = bodies.envelope(self.input_subject, self._reply, None, message)
        self._session.publish(self.input_subject, bodies.to_msgpack(frame))

    def _lost(self) -> None:
        self.closed = self.closed or "the connection to the bus was lost; attach again"

    def _receive(self, item: WireMessage) -> None:
        refusal = refusal_of(item)
        if refusal is not None:
            raise nobody(self._subject) if refusal.reason == NOBODY else refusal
        try:
            value = bodies.read(item.body)
        except bodies.UndecodableError as error:
            raise CliError(Exit.REFUSED, "unreadable", str(error)) from None
        if isinstance(value, Mapping) and not self.closed:
            self._take(value)

    def _take(self, message: Mapping[str, Any]) -> None:
        self._heard, self._heard_s = True, time.monotonic()
        self.input_subject = str(message.get("input_subject") or self.input_subject)
        data = bytes(message.get("data") or b"")
        try:
            self._flow.came(int(message.get("at") or 0), len(data))
        except BrokenStreamError as error:
            self.closed = str(error)
            return
        self._flow.limited(int(message.get("upto") or 0))
        if message.get("note"):
            self._note(str(message["note"]))
        if data:
            self._write(data)
            if self._flow.took(len(data)):
                self._say({"upto": self._flow.upto})
        self.closed = str(message.get("closed") or "")


def owner() -> str:
    """Return `user@host` of this process, which other clients of the console see."""
    return f"{os.environ.get('USER') or os.getuid()}@{os.uname().nodename}"[:128]


def node_subject(view: Mapping[str, Any], verb: str) -> str:
    """Return `virtbus.node.<node>.rpc.agent.<verb>` for the VM's node; raises as `node_of`."""
    return f"virtbus.node.{node_of(view)}.rpc.agent.{verb}"


def node_of(view: Mapping[str, Any]) -> str:
    """Return the VM's node.

    Raises:
        CliError: the VM has no node.
    """
    node = str(view.get("node") or "_")
    if node == "_":
        name = view.get("name")
        raise CliError(
            Exit.REFUSED,
            "not_placed",
            f"{name} has no node yet, so nothing of it runs",
            hint=f"`virtbus vm get {name}` says what it waits for",
        )
    return node
