"""Makes the text with examples of commands that `up` prints when all services are ready."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

from virtbus.cli.up.plan import BUS_ONLY, Place
from virtbus.cli.wire.access import DEFAULT_RUN_DIR

_FRAME = len("│  │")


def lines(place: Place, creds: dict[str, Any], nats_log: Path) -> list[str]:
    """Return the lines of the box for `virtbus up`.

    A command in the box contains the client's password, so that a person can copy the command.
    """
    urls = str(creds["url"]).split(",")
    scheme, _, address = urls[0].partition("://")
    login = f"{scheme}://{creds['user']}:{creds['password']}@{address}"
    return [
        "virtbus is up: "
        + ("bus and controller" if place.runs == BUS_ONLY else f"node {place.node}")
        + (" (simulated: no real VMs)" if place.simulate else ""),
        "",
        "Try, in another terminal:",
        *_environment(place),
        "  virtbus vm create web --image tiny --wait ready",
        "  virtbus vm list          virtbus vm console web          virtbus vm delete web",
        "",
        "The same from any NATS client:",
        f"  nats --server {login} req virtbus.api.v1.vm.create '"
        + json.dumps({"name": "web", "image": "tiny"})
        + "'",
        "",
        f"Highly available while {len(urls) // 2 + 1} of {len(urls)} NATS servers run."
        if len(urls) > 1
        else "Not highly available: one NATS server. VMs keep running when it or a service ends.",
        f"Files: {place.state_dir}, {place.run_dir}; the server's log: {nats_log}",
        "Ctrl-C stops the services and leaves VMs running.",
    ]


def node_lines(place: Place) -> list[str]:
    """Return the lines of the box for `virtbus node up`."""
    return [
        f"virtbus is up: node {place.node}"
        + (" (simulated: no real VMs)" if place.simulate else "")
        + f", on the bus at {place.server}",
        "",
        "Where a client has credentials of the bus:  virtbus node list",
        "",
        f"Files: {place.state_dir}, {place.run_dir}",
        "Ctrl-C stops the services and leaves VMs running.",
    ]


def _environment(place: Place) -> list[str]:
    if place.run_dir == Path(DEFAULT_RUN_DIR):
        return []
    return [f"  export VIRTBUS_CREDS={place.client_creds}"]


def box(text: list[str], *, drawn: bool, columns: int = 80) -> str:
    """Return the lines in frames of at most `columns` characters, or (not `drawn`) without frames.

    Wider lines have no frame, so that a person can copy them.
    """
    if not drawn:
        return "\n".join(text)
    room = columns - _FRAME
    width = max((len(line) for line in text if len(line) <= room), default=0)
    parts: list[str] = []
    for fits, group in groupby(text, key=lambda line: len(line) <= room):
        run = list(group)
        parts += _framed(run, width) if fits else run
    return "\n".join(parts)


def _framed(text: list[str], width: int) -> list[str]:
    edge = "─" * (width + 2)
    return [f"┌{edge}┐", *(f"│ {line:<{width}} │" for line in text), f"└{edge}┘"]
