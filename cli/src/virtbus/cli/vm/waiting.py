"""Waits for a VM, and shows its events and progress as steps.

Only a view of the VM from the API's watch, or the time limit, ends the wait. Events do not.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from virtbus.cli import units
from virtbus.cli.failures import CliError, Exit, unknown
from virtbus.cli.progress import Steps
from virtbus.cli.vm import view as views
from virtbus.cli.wire import message as bodies
from virtbus.cli.wire.protocol import WireMessage
from virtbus.cli.wire.session import Session
from virtbus.cli.wire.watch import WatchObserver, WireWatch

_TICK_S = 0.1
_STOPPING = "domain.stopping"
_REMIND_AFTER_S = 1.0
_OFF = {"Pending", "Stopped", "Succeeded", "Failed"}

Verdict = Callable[[Mapping[str, Any] | None], bool]
"""A function that returns True if a VM's view ends the wait. The function may raise CliError.

The view is None if the VM does not exist or was deleted.
"""


class WaitProgress(WatchObserver):
    """Follows one VM during a wait, and prints its steps."""

    def __init__(self, session: Session, uid: str, steps: Steps, label: str = "") -> None:
        self._label = f"{label}  " if label else ""
        self._grace_s = 0
        self._why = ""
        self._session = session
        self._uid = uid
        self._steps = steps
        self._watch = WireWatch(session, {"uid": uid}, self)
        self._seen: dict[str, Mapping[str, Any]] = {}
        self.synced_once = False
        self.was_seen = False

    def listen(self) -> None:
        """Show events and progress as steps. Call `listen` before the request, to miss no step."""
        self._session.subscribe(f"virtbus.evt.*.{self._uid}.>", self._event)
        self._session.subscribe(f"virtbus.node.*.progress.{self._uid}.*", self._progress)

    def stopping(self, view: Mapping[str, Any], grace_s: int | None) -> None:
        """Set the grace that `until` shows after 1 s without an event `domain.stopping`."""
        if views.state(view) in _OFF:
            return
        spec = view.get("spec") or {}
        usual_s = spec.get("termination_grace_s")
        self._grace_s = int(usual_s if grace_s is None and usual_s is not None else grace_s or 0)

    @property
    def view(self) -> Mapping[str, Any] | None:
        """Return the VM's last view; None before the first list and after the VM's delete."""
        return self._seen.get(self._uid)

    def until(self, verdict: Verdict, timeout_s: float) -> bool:
        """Process messages until `verdict` returns True; return False at the time limit."""
        self._watch.start()
        deadline = time.monotonic() + timeout_s
        while not (self.synced_once and verdict(self.view)):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            self._session.pump(min(left_s, _TICK_S))
            self._watch.tick()
            self._steps.tick()
            if self._grace_s and time.monotonic() > deadline - timeout_s + _REMIND_AFTER_S:
                self._steps.step(f"{self._label}{_STOPPING:<18}", _grace(self._grace_s))
                self._grace_s = 0
        return True

    def settle(
        self,
        view: Mapping[str, Any],
        reached: Callable[[Mapping[str, Any]], bool],
        missed: str,
        timeout_s: float,
    ) -> Mapping[str, Any]:
        """Wait until `reached` returns True for the VM's view; return the view. Close the steps.

        Raises:
            CliError: the VM was deleted, `reached` raised this error, or the time limit was
                reached. The message for the time limit begins with the VM's name and `missed`.
        """
        name = view.get("name")

        def verdict(seen: Mapping[str, Any] | None) -> bool:
            if seen is None:
                raise CliError(Exit.NOT_FOUND, "deleted", f"{name} was deleted meanwhile")
            return reached(seen)

        try:
            self.listen()
            if self.until(verdict, timeout_s):
                return self.view or view
        finally:
            self._steps.close()
        state = views.state(self.view or view)
        raise unknown(
            f"{name} {missed} after {units.duration(timeout_s)}; it is {state}",
            f"it continues by itself: `virtbus vm get {name}`",
        )

    # --- from the watch ----------------------------------------------------------------------

    def vm(self, view: Mapping[str, Any]) -> None:
        if view.get("uid") != self._uid:
            return
        self._seen[self._uid] = view
        self.was_seen = True
        # a change shows that the VM exists, even before the list is complete
        self.synced_once = True
        self._steps.status(f"{self._label}{_status(view)}")
        self._pending(view)

    def _pending(self, view: Mapping[str, Any]) -> None:
        """Show a step for each new reason why the VM has no node."""
        why = str(view.get("message") or "") if views.node(view) == "-" else ""
        if why and why != self._why:
            self._steps.step(f"{self._label}{'vm.pending':<18}", why)
        self._why = why

    def gone(self, uid: str) -> None:
        if uid == self._uid:
            self._seen.pop(uid, None)
            self.synced_once = True

    def synced(self) -> None:
        self.synced_once = True

    def restarted(self) -> None:
        self._seen.clear()
        self.synced_once = False

    # --- steps -------------------------------------------------------------------------------

    def _event(self, item: WireMessage) -> None:
        fact = _map_of(item)
        kind = str(fact.get("kind") or ".".join(item.subject.split(".")[4:]))
        if kind == "trace.span":
            return
        if kind == _STOPPING:
            self._grace_s = 0
        self._steps.step(f"{self._label}{kind:<18}", detail_of(fact))

    def _progress(self, item: WireMessage) -> None:
        report = _map_of(item)
        done = int(report.get("done_bytes") or 0)
        what = str(report.get("message") or report.get("step") or "transfer")
        self._steps.transfer(what, done, report.get("total_bytes"))


def failed(view: Mapping[str, Any]) -> CliError:
    """Return the error for a VM whose guest failed during the wait."""
    name = view.get("name")
    why = view.get("message") or view.get("reason") or "no reason is known"
    hint = f"`virtbus vm events {name}` shows each step"
    return CliError(Exit.REFUSED, "failed", f"{name} is Failed: {why}", hint=hint)


def _grace(grace_s: int) -> str:
    return f"grace {grace_s} s: the guest is asked to shut down; --grace 0 ends it at once"


def detail_of(fact: Mapping[str, Any]) -> str:
    """Return an event's message or reason, and its duration in parentheses."""
    parts = [str(fact.get("message") or fact.get("reason") or "")]
    if fact.get("took_ms") is not None:
        parts.append(f"({units.span_ms(float(fact['took_ms']))})")
    return " ".join(part for part in parts if part)


def _status(view: Mapping[str, Any]) -> str:
    where = views.node(view)
    why = str(view.get("message") or "")
    return " ".join(
        part for part in (views.state(view), f"on {where}" if where != "-" else "", why) if part
    )


def _map_of(item: WireMessage) -> Mapping[str, Any]:
    try:
        value = bodies.data_of(item.body)
    except bodies.UndecodableError:
        return {}
    return value if isinstance(value, Mapping) else {}
