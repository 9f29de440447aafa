"""Reads stored events from the API verb `vm.events`, including events of deleted VMs."""

from collections.abc import Iterator
from typing import Any

from virtbus.cli.event_lines import kind_of
from virtbus.cli.failures import CliError, Exit
from virtbus.cli.invocation import Invocation
from virtbus.cli.vm.target import is_uid, ref

PAGE = 200
_OF_VMS = ("vm.", "domain.", "guest.")
"""Prefixes of the kinds of VM events. Events of volumes and other objects also have a name."""


def stored(
    invocation: Invocation, *, uid: str | None = None, spans: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield the stored events (`EventItem` maps) of the VM `uid`, in order of arrival.

    Without `uid`, yield all stored events. With `spans`, trace spans are included.
    """
    after = 0
    while True:
        query: dict[str, Any] = {"after": after, "limit": PAGE, "spans": spans}
        if uid is not None:
            query["uid"] = uid
        page = invocation.call("vm", "events", query)
        yield from page.get("items") or []
        if page.get("next_after") is None:
            return
        after = int(page["next_after"])


def uid_of(invocation: Invocation, name: str, namespace: str) -> str:
    """Return the uid of a VM, or of a deleted VM whose events are still stored (72 h).

    Raises:
        CliError: neither a VM nor an event has that name (exit code 3).
    """
    if is_uid(name):
        return name.lower()
    try:
        return str(invocation.call("vm", "get", ref(name, namespace)).get("uid"))
    except CliError as error:
        if error.exit_code is not Exit.NOT_FOUND:
            raise
        found = _last_with(invocation, name, namespace)
        if found is None:
            raise
        return found


def _last_with(invocation: Invocation, name: str, namespace: str) -> str | None:
    found: str | None = None
    for item in stored(invocation):
        fact = item.get("data") or {}
        if not kind_of(item).startswith(_OF_VMS):
            continue
        if fact.get("name") == name and (fact.get("namespace") or "default") == namespace:
            found = str(fact.get("uid"))
    return found
