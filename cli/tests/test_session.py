"""A session whose connections break while it sends."""

import time
from collections.abc import Iterator

import pytest

from virtbus.cli.failures import CliError, Exit
from virtbus.cli.wire import session as wire_session
from virtbus.cli.wire.access import Access
from virtbus.cli.wire.connection import Connection, LinkError
from virtbus.cli.wire.protocol import WireMessage
from virtbus.cli.wire.session import Session
from virtbus.schemas.envelope import open_envelope


class Link:
    """A connection that is lost after `sends` subscriptions and messages."""

    def __init__(self, sends: int) -> None:
        self._sends = sends
        self.sent: list[str] = []

    def subscribe(self, subject: str) -> int:
        self.publish(subject)
        return len(self.sent)

    def publish(self, subject: str, *_: object, **__: object) -> None:
        if len(self.sent) == self._sends:
            raise LinkError("reset by peer")
        self.sent.append(subject)

    def messages(self, *_: object) -> list[WireMessage]:
        raise LinkError("closed by the server")

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Link]]:
    """Connections for the next sessions, each for one connect; without one, a connect fails."""
    links: list[Link] = []
    rest = iter(links)

    def opened(_access: Access) -> Link:
        link = next(rest, None)
        if link is None:
            raise LinkError("connection refused")
        return link

    monkeypatch.setattr(Connection, "open", opened)
    monkeypatch.setattr(wire_session, "RECONNECT_PATIENCE_S", 0.5)
    yield links
    assert next(rest, None) is None


def session() -> Session:
    return Session(Access((), address_source="VIRTBUS_SERVER"))


def refuse(error: CliError) -> None:
    """Check that the error is the usual one, with the next step."""
    assert error.exit_code is Exit.UNAVAILABLE
    assert "the bus does not answer: " in error.message
    assert "`virtbus up`" in error.hint


def test_a_message_whose_second_try_fails_is_unavailable(connected: list[Link]) -> None:
    connected += [Link(1), Link(1)]
    with pytest.raises(CliError, match="reset by peer") as raised:
        session().publish("a", b"")
    refuse(raised.value)


def test_a_connection_that_breaks_while_it_subscribes_is_replaced(connected: list[Link]) -> None:
    connected += [Link(2), Link(1), Link(0), Link(3)]
    one = session()
    one.subscribe("kept", lambda _message: None)
    one.publish("a", b"")
    assert connected[-1].sent[1:] == ["kept", "a"]


def test_no_connection_that_takes_all_subscriptions_is_unavailable(connected: list[Link]) -> None:
    connected += [Link(1), Link(0)]
    begun_s = time.monotonic()
    with pytest.raises(CliError) as raised:
        session().publish("a", b"")
    refuse(raised.value)
    assert time.monotonic() - begun_s < 5


@pytest.mark.parametrize("sends", [(2,), (2, 1)])
def test_a_request_that_was_sent_before_the_loss_may_have_happened(
    connected: list[Link], sends: tuple[int, ...]
) -> None:
    connected += [Link(number) for number in sends]
    with pytest.raises(CliError, match=r"vm\.get may or may not have happened") as raised:
        session().request("vm.get", {})
    assert raised.value.exit_code is Exit.UNKNOWN


def test_a_request_that_was_never_sent_has_not_happened(connected: list[Link]) -> None:
    connected += [Link(1)]
    with pytest.raises(CliError) as raised:
        session().request("vm.get", {})
    refuse(raised.value)


def test_a_first_connection_that_breaks_at_once_is_replaced(connected: list[Link]) -> None:
    connected += [Link(0), Link(1)]
    session()
    assert len(connected[-1].sent) == 1


def test_a_long_wait_keeps_within_the_envelopes_time_limit(
    connected: list[Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bytes] = []
    monkeypatch.setattr(Link, "publish", lambda _link, _subject, body, **_: sent.append(body))
    monkeypatch.setattr(Link, "subscribe", lambda *_: 1)
    connected += [Link(1)]
    with pytest.raises(CliError):
        session().request("image.pull", {}, timeout_s=7200)
    assert open_envelope(sent[0]).timeout_ms == 3_600_000
