"""Watches VMs by `vm.watch`: renews the watch, and repeats the request if replies stop."""

import time
from collections.abc import Mapping
from typing import Any

from virtbus.bus.client.message_format import CONTENT_TYPE, JSON
from virtbus.cli.failures import CliError, Exit
from virtbus.cli.wire import message as bodies
from virtbus.cli.wire.protocol import WireMessage
from virtbus.cli.wire.session import NOBODY, Session, refusal_of

SUBJECT = "virtbus.api.v1.vm.watch"
RENEW_EVERY_S = 12.0
"""Interval of renewals. The controller ends a watch after 30 s without a renewal."""
SILENCE_S = 12.0
"""Time without a reply after which the watch is requested again. The controller replies at least
every 5 s, with a `beat` if nothing changed. So after this time at least two replies were lost."""
RETRY_S = 0.5


class WatchObserver:
    """The callbacks of a watch, which do nothing by default."""

    def vm(self, view: Mapping[str, Any]) -> None:
        """Handle a VM of the first list, or a changed VM."""

    def gone(self, uid: str) -> None:
        """Handle a VM that was deleted or no longer matches the query."""

    def synced(self) -> None:
        """Handle the end of the first list."""

    def restarted(self) -> None:
        """Handle the start of a new list. VMs that are not in the new list are gone."""


class WireWatch:
    """One `vm.watch`. The caller pumps the session, and calls `tick` at least every second."""

    def __init__(self, session: Session, query: Mapping[str, Any], observer: WatchObserver) -> None:
        self._session = session
        self._query = dict(query)
        self._observer = observer
        self._reply = ""
        self._renew_subject = ""
        self._renewed = self._heard = self._asked = 0.0
        self._broken = False
        session.on_reconnect(self.start)

    def start(self) -> None:
        """Request the watch, which starts with a full list."""
        if self._reply:
            self._session.forget(self._reply)
            self._observer.restarted()
        self._reply = self._session.inbox(self._receive)
        self._renew_subject = ""
        self._broken = False
        self._asked = self._heard = self._renewed = time.monotonic()
        frame = bodies.envelope(SUBJECT, self._reply, None, self._query)
        self._session.publish(
            SUBJECT,
            bodies.to_json(frame),
            reply=self._reply,
            headers={CONTENT_TYPE: JSON},
        )

    def tick(self) -> None:
        """Renew the watch, or request a failed or silent watch again."""
        now = time.monotonic()
        if (self._broken and now - self._asked > RETRY_S) or now - self._heard > SILENCE_S:
            self.start()
        elif now - self._renewed > RENEW_EVERY_S:
            self._renew()

    def _renew(self) -> None:
        if self._renew_subject:
            self._renewed = time.monotonic()
            self._session.publish(self._renew_subject, b"{}")

    def _receive(self, item: WireMessage) -> None:
        refusal = refusal_of(item)
        if refusal is not None:
            if refusal.reason == NOBODY or refusal.retry == "later":
                self._broken = True
                return
            if refusal.code == 410:
                self._broken, self._asked = True, 0.0
                return
            raise refusal
        try:
            reply = bodies.read(item.body)
        except bodies.UndecodableError as error:
            raise CliError(Exit.REFUSED, "unreadable", str(error)) from None
        if not isinstance(reply, Mapping):
            return
        self._heard = time.monotonic()
        self._renew_subject = str(reply.get("renew") or self._renew_subject)
        self._tell(reply)

    def _tell(self, reply: Mapping[str, Any]) -> None:
        if reply.get("resync"):
            self._observer.restarted()
        for view in reply.get("items") or ():
            self._observer.vm(view)
        if reply.get("change"):
            self._observer.vm(reply["change"])
        if reply.get("gone"):
            self._observer.gone(str(reply["gone"]))
        if reply.get("synced"):
            self._renew()
            self._observer.synced()
