"""Sends requests and keeps subscriptions across reconnects.

The error of a request says whether the request may have acted. A session has no thread: a waiting
caller calls `pump`, which passes each message to the callback of its subscription.
"""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from virtbus.bus.client.message_format import CONTENT_TYPE, ERROR_CODE, ERROR_TEXT, JSON
from virtbus.bus.client.nats_protocol import MalformedError
from virtbus.bus.errors import FullError
from virtbus.cli.failures import CliError, Exit, unavailable, unknown
from virtbus.cli.wire import message as bodies
from virtbus.cli.wire.access import Access
from virtbus.cli.wire.connection import Connection, LinkError, LoginDeniedError
from virtbus.cli.wire.protocol import WireMessage

REQUEST_TIMEOUT_S = 10.0
NOBODY_PATIENCE_S = 3.0
"""Time for which a request is repeated while no service subscribes to its subject. The service may
be restarting."""
RECONNECT_PATIENCE_S = 30.0
_REPEAT_FIRST_S = 0.1
_REPEAT_MOST_S = 2.0
_REPEAT_AFTER_MS = 2000
"""Limit of an error's `after_ms` for a repeat. A request is repeated after a refusal with retry
`later` only if `after_ms` is within this limit. If not, the error is raised, and the user decides.
"""
MAX_TIMEOUT_MS = 3_600_000
"""The longest `timeout_ms` of an envelope (`schemas.envelope`). The wait itself may be longer."""
Receive = Callable[[WireMessage], None]
T = TypeVar("T")


class _Subscription:
    """A subscription that is repeated on every new connection."""

    def __init__(self, subject: str, receive: Receive) -> None:
        self.subject = subject
        self.receive = receive


class Session:
    """A connection that reconnects by itself and then repeats its subscriptions."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._subscriptions: dict[int, _Subscription] = {}
        self._reconnected: list[Callable[[], None]] = []
        self._connection = self._connect()
        self._inbox = f"{access.inbox_prefix}.{os.urandom(8).hex()}"
        self._answers: dict[str, Receive] = {}
        self.subscribe(f"{self._inbox}.*", self._answered)

    @property
    def server(self) -> Mapping[str, Any]:
        return self._connection.server

    def close(self) -> None:
        self._connection.close()

    def on_reconnect(self, call: Callable[[], None]) -> None:
        self._reconnected.append(call)

    def subscribe(self, subject: str, receive: Receive) -> None:
        """Pass every message of `subject` to `receive` from now on, also after reconnects.

        Raises:
            CliError: the connection was lost, and reconnecting failed.
        """
        sid = self._sent(lambda: self._connection.subscribe(subject))
        self._subscriptions[sid] = _Subscription(subject, receive)

    def inbox(self, receive: Receive) -> str:
        """Return a reply subject whose messages go to `receive`."""
        token = os.urandom(12).hex()
        self._answers[token] = receive
        return f"{self._inbox}.{token}"

    def forget(self, reply: str) -> None:
        self._answers.pop(reply.rpartition(".")[2], None)

    def publish(
        self,
        subject: str,
        body: bytes,
        *,
        reply: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send a message. If the connection is lost, reconnect and send the message again.

        Raises:
            CliError: there is no connection, or the message cannot be sent.
        """
        try:
            self._sent(
                lambda: self._connection.publish(subject, body, reply=reply, headers=headers)
            )
        except (FullError, MalformedError) as error:
            raise CliError(Exit.REFUSED, "unsendable", str(error)) from None

    def pump(self, timeout_s: float, also: int | None = None) -> None:
        """Pass received messages to their subscriptions.

        Wait up to `timeout_s` for the first message. Return earlier if the file descriptor `also`
        is readable.

        Raises:
            CliError: the connection was lost and reconnecting failed, or a subject is denied.
        """
        try:
            for item in self._connection.messages(timeout_s, also):
                subscription = self._subscriptions.get(item.sid)
                if subscription is not None:
                    subscription.receive(item)
        except LinkError:
            self._reconnect(time.monotonic() + RECONNECT_PATIENCE_S)
        except LoginDeniedError as error:
            raise denied(error, self._access) from None

    def request(
        self,
        subject: str,
        data: Any,
        *,
        timeout_s: float = REQUEST_TIMEOUT_S,
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Send a request and return its answer, a map.

        The request is repeated with the same id while its outcome is unknown, or if its error
        permits a repeat.

        Raises:
            CliError: the request was refused; `unavailable`, if it had no effect; `unknown`, if it
                may have acted and no answer came.
        """
        return _Asking(self, subject, data, timeout_s, dict(headers or {})).answer()

    # --- connection -----------------------------------------------------------------------

    def _connect(self) -> Connection:
        try:
            return Connection.open(self._access)
        except LinkError as error:
            raise self._lost(error) from None
        except LoginDeniedError as error:
            raise denied(error, self._access) from None

    def _lost(self, error: LinkError) -> CliError:
        return unavailable(
            f"the bus does not answer: {error}",
            f"is `virtbus up` running? (the address is from {self._access.address_source})",
        )

    def _sent(self, send: Callable[[], T]) -> T:
        """Return the result of `send`; if the connection is lost, reconnect and repeat `send`."""
        try:
            return send()
        except LinkError:
            self._reconnect(time.monotonic() + RECONNECT_PATIENCE_S)
        try:
            return send()
        except LinkError as error:
            raise self._lost(error) from None

    def _reconnect(self, deadline: float) -> None:
        self._connection.close()
        pause_s = _REPEAT_FIRST_S
        while True:
            try:
                self._connection = self._connected_again()
                break
            except CliError:
                if time.monotonic() + pause_s > deadline:
                    raise
                time.sleep(pause_s)
                pause_s = min(_REPEAT_MOST_S, pause_s * 2)
        for call in self._reconnected:
            call()

    def _connected_again(self) -> Connection:
        connection = self._connect()
        try:
            self._subscriptions = {
                connection.subscribe(one.subject): one for one in self._subscriptions.values()
            }
        except LinkError as error:
            connection.close()
            raise self._lost(error) from None
        return connection

    @property
    def connection_id(self) -> int:
        """Return a number that changes with each reconnect."""
        return id(self._connection)

    def _answered(self, item: WireMessage) -> None:
        receive = self._answers.get(item.subject.rpartition(".")[2])
        if receive is not None:
            receive(item)


class _Asking:
    """One request, which is repeated until it has an outcome or its time limit passes."""

    def __init__(
        self, session: Session, subject: str, data: Any, timeout_s: float, headers: dict[str, str]
    ) -> None:
        self._session = session
        self._subject = subject
        self._started = time.monotonic()
        self._deadline = self._started + timeout_s
        self._id = os.urandom(16).hex()
        self._data = data
        self._headers = headers | {CONTENT_TYPE: JSON}
        self._got: list[WireMessage] = []
        self._may_have_happened = False
        self._refused: CliError | None = None

    def answer(self) -> dict[str, Any]:
        try:
            return self._answer()
        except CliError as error:
            nobody_answered = error.exit_code is Exit.UNAVAILABLE and not error.code
            if nobody_answered and self._may_have_happened:
                raise self._unknown(error.message) from None
            raise

    def _answer(self) -> dict[str, Any]:
        pause_s = _REPEAT_FIRST_S
        while True:
            item = self._attempt()
            if item is None:
                self._may_have_happened = True
            else:
                refusal = refusal_of(item)
                if refusal is None:
                    return _as_map(item)
                if not self._worth_repeating(refusal):
                    raise nobody(self._subject) if refusal.reason == NOBODY else refusal
                self._refused = None if refusal.reason == NOBODY else refusal
                pause_s = max(pause_s, (refusal.after_ms or 0) / 1000)
            if time.monotonic() + pause_s >= self._deadline:
                raise self._out_of_time()
            self._wait(pause_s)
            pause_s = min(_REPEAT_MOST_S, pause_s * 2)

    def _attempt(self) -> WireMessage | None:
        """Send the request once and return its first answer.

        Return None if the connection is lost, or the time limit passes, before the answer.
        """
        session = self._session
        left_s = self._deadline - time.monotonic()
        timeout_ms = min(int(left_s * 1000), MAX_TIMEOUT_MS)
        frame = bodies.envelope(self._subject, self._id, timeout_ms, self._data)
        self._got.clear()
        reply = session.inbox(self._got.append)
        try:
            session.publish(
                self._subject, bodies.to_json(frame), reply=reply, headers=self._headers
            )
            connection = session.connection_id
            while not self._got:
                left_s = self._deadline - time.monotonic()
                if left_s <= 0 or session.connection_id != connection:
                    return None
                try:
                    session.pump(left_s)
                except CliError:
                    self._may_have_happened = True
                    raise
            return self._got[0]
        finally:
            session.forget(reply)

    def _worth_repeating(self, refusal: CliError) -> bool:
        if refusal.reason == NOBODY:
            return time.monotonic() - self._started < NOBODY_PATIENCE_S
        if refusal.retry == "same_id":
            self._may_have_happened = True
        if refusal.retry == "later" and (refusal.after_ms or 0) > _REPEAT_AFTER_MS:
            return False
        return refusal.retry != "never" and refusal.after_ms is not None

    def _out_of_time(self) -> CliError:
        if not self._may_have_happened:
            return self._refused or nobody(self._subject)
        return self._unknown("no answer in time")

    def _unknown(self, why: str) -> CliError:
        return unknown(
            f"{self._subject} may or may not have happened: {why}",
            "look with `virtbus vm list`, or repeat the same command",
        )

    def _wait(self, pause_s: float) -> None:
        until = time.monotonic() + pause_s
        while (left_s := until - time.monotonic()) > 0:
            self._session.pump(left_s)


NOBODY = "no_responders"


def nobody(subject: str) -> CliError:
    """Return the error for a subject that no service responds on."""
    part = "node's agent" if subject.startswith("virtbus.node.") else "controller"
    return CliError(
        Exit.UNAVAILABLE,
        NOBODY,
        f"the bus is there, but no {part} answers on {subject}",
        hint="`virtbus status` shows which services run; `virtbus up` starts them",
    )


def refusal_of(item: WireMessage) -> CliError | None:
    """Return the error in an answer, or None."""
    if item.status == "503" and not item.body:
        return nobody("")
    code = item.headers.get(ERROR_CODE, "")
    if not code:
        return None
    try:
        body = bodies.read(item.body)
    except bodies.UndecodableError:
        body = None
    body = body.get("error") if isinstance(body, Mapping) else None
    if not isinstance(body, Mapping):
        text = item.headers.get(ERROR_TEXT, "")
        body = {"code": int(code) if code.isdecimal() else 500, "message": text}
    return CliError.answered(body)


def denied(error: LoginDeniedError, access: Access) -> CliError:
    """Return the error for refused credentials or a refused subject."""
    return CliError(
        Exit.REFUSED,
        "denied",
        f"the bus refuses: {error}",
        hint=f"the credentials come from {access.source}; name others with --creds",
    )


def _as_map(item: WireMessage) -> dict[str, Any]:
    try:
        value = bodies.read(item.body)
    except bodies.UndecodableError as error:
        raise CliError(Exit.REFUSED, "unreadable", str(error)) from None
    return dict(value) if isinstance(value, Mapping) else {}
