"""Implements `virtbus vm list`."""

import sys
from collections.abc import Mapping
from typing import Any

import click

from virtbus.cli import output
from virtbus.cli.failures import CliError, Exit
from virtbus.cli.invocation import PAGE, Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.vm import request
from virtbus.cli.vm import view as views
from virtbus.cli.vm.target import namespace_filter
from virtbus.cli.wire.watch import WatchObserver, WireWatch

_TICK_S = 1.0


@click.command(
    epilog=examples(
        """
        virtbus vm list
        virtbus vm list -l tier=front
        virtbus vm list -w                  every change, until Ctrl-C
        virtbus vm list -o json | jq -r '.items[].name'
        """
    )
)
@namespace_filter
@click.option(
    "-l",
    "--label",
    "label_texts",
    multiple=True,
    metavar="K=V",
    help="Only VMs with this label; repeatable.",
)
@click.option("-w", "--watch", is_flag=True, help="Continue with every change.")
@verb
def command(
    invocation: Invocation, *, namespace: str | None, label_texts: tuple[str, ...], watch: bool
) -> None:
    """List VMs.

    With -w, the command prints one line for each change; with -o json, the line is a JSON object.
    The last line of a VM has the state Deleted, or Unmatched if the VM lost the labels of -l.
    """
    query: dict[str, Any] = {}
    if namespace:
        query["namespace"] = namespace
    if label_texts:
        query["labels"] = request.labels(label_texts)
    if watch:
        _follow(invocation, query)
        return
    found = invocation.listed("vm", {**query, "limit": PAGE})["items"]
    if not found:
        invocation.note("no VMs; make one: virtbus vm create web --image tiny --wait ready")
        if invocation.for_eyes:
            return
    invocation.show({"items": found}, lambda: views.table(found))


def _follow(invocation: Invocation, query: Mapping[str, Any]) -> None:
    session = invocation.session
    lines = _Lines(invocation)
    watch = WireWatch(session, query, lines)
    watch.start()
    while True:
        session.pump(_TICK_S)
        watch.tick()
        while lines.ended:
            view = lines.ended.pop(0)
            there = "labels" in query and _exists(invocation, str(view.get("uid")))
            lines.say({**view, "state": "Unmatched" if there else "Deleted"})


def _exists(invocation: Invocation, uid: str) -> bool:
    try:
        invocation.call("vm", "get", {"uid": uid})
    except CliError as error:
        if error.exit_code is not Exit.NOT_FOUND:
            raise
        return False
    return True


class _Lines(WatchObserver):
    """Prints a line for each VM that is new or has changed."""

    def __init__(self, invocation: Invocation) -> None:
        self._style = invocation.style
        self._last: dict[str, tuple[str, ...]] = {}
        self._named: dict[str, Mapping[str, Any]] = {}
        self._listed: set[str] | None = None
        self._headed = False
        self.ended: list[Mapping[str, Any]] = []
        """The last views of the VMs that left the watch, until `_follow` prints them."""

    def vm(self, view: Mapping[str, Any]) -> None:
        uid = str(view.get("uid"))
        if self._listed is not None:
            self._listed.add(uid)
        cells = views.row(view)
        self._named[uid] = view
        if self._last.get(uid, ())[:-1] == cells[:-1] and self._style == "table":
            return
        self._last[uid] = cells
        self.say(view)

    def gone(self, uid: str) -> None:
        self._last.pop(uid, None)
        view = self._named.pop(uid, None)
        if view is not None:
            self.ended.append(view)

    def restarted(self) -> None:
        self._listed = set()

    def synced(self) -> None:
        if self._listed is not None:
            for uid in set(self._named) - self._listed:
                self.gone(uid)
            self._listed = None

    def say(self, view: Mapping[str, Any]) -> None:
        if self._style != "table":
            output.write(output.document(view, self._style))
        else:
            if not self._headed:
                output.write(_line(views.HEADER))
                self._headed = True
            output.write(_line(views.row(view)))
        output.flush(sys.stdout)


_WIDTHS = (20, 10, 14, 16, 14, 4, 7, 0)


def _line(cells: tuple[str, ...]) -> str:
    padded = [output.safe(cell).ljust(width) for cell, width in zip(cells, _WIDTHS, strict=True)]
    painted = [output.paint_state(cell, sys.stdout) for cell in padded]
    return "  ".join(painted).rstrip()
