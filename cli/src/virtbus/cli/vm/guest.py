"""Implements `virtbus vm guest`."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import click

from virtbus.cli import output, units
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.vm.get import fetch
from virtbus.cli.vm.serial import node_subject
from virtbus.cli.vm.target import name_argument, namespace_option

_ANSWER_S = 5.0
"""Time for the answer beyond --timeout, which limits the node's wait for the guest."""
_SHOWN = ("os", "users", "filesystems", "interfaces")
Info = Mapping[str, Any]


@click.command(
    epilog=examples(
        """
        virtbus vm guest web                        all that the guest can tell
        virtbus vm guest web filesystems
        virtbus vm guest web ping                   does its agent answer?
        virtbus vm guest web -o json | jq -r .os.pretty_name
        """
    )
)
@name_argument
@click.argument("about", required=False, type=click.Choice((*_SHOWN, "ping")))
@click.option(
    "--timeout",
    default=5.0,
    show_default=True,
    metavar="S",
    type=click.FloatRange(1, 60),
    help="Time limit for the guest.",
)
@namespace_option
@verb
def command(
    invocation: Invocation, *, name: str, about: str | None, timeout: float, namespace: str
) -> None:
    """Show information of the VM NAME's guest, from the QEMU guest agent that runs in it."""
    view = fetch(invocation, name, namespace)
    query = {
        "uid": view.get("uid"),
        "about": [about] if about else [],
        "timeout_s": timeout,
    }
    subject = node_subject(view, "guest")
    info = invocation.session.request(subject, query, timeout_s=timeout + _ANSWER_S)
    invocation.show(info, lambda: _text(info, about))


def _text(info: Info, about: str | None) -> str:
    if about == "ping":
        return f"{output.safe(info.get('hostname') or 'the guest')} answers"
    return "\n\n".join(_SECTIONS[part](info) for part in ([about] if about else _SHOWN))


def _os(info: Info) -> str:
    os = info.get("os") or {}
    kernel = " ".join(str(os.get(key) or "") for key in ("kernel_release", "machine"))
    return output.table(
        ("HOSTNAME", "SYSTEM", "KERNEL", "TIMEZONE"),
        [
            (
                info.get("hostname") or "-",
                os.get("pretty_name") or os.get("name") or "-",
                kernel.strip() or "-",
                os.get("timezone") or "-",
            )
        ],
    )


def _users(info: Info) -> str:
    def since(user: Info) -> str:
        login_time = time.gmtime(float(user.get("login_time_s") or 0))
        return time.strftime("%Y-%m-%d %H:%M:%SZ", login_time)

    rows = ((user.get("name", ""), since(user)) for user in _items(info, "users"))
    return output.table(("USER", "SINCE"), rows)


def _filesystems(info: Info) -> str:
    rows = (
        (
            fs.get("mountpoint", ""),
            fs.get("name", ""),
            fs.get("type", ""),
            units.size(fs.get("total_bytes")),
            units.size(fs.get("used_bytes")),
            ",".join(map(str, fs.get("disks") or ())) or "-",
        )
        for fs in _items(info, "filesystems")
    )
    return output.table(("MOUNTPOINT", "NAME", "TYPE", "SIZE", "USED", "DISKS"), rows)


def _interfaces(info: Info) -> str:
    rows = (
        (nic.get("name", ""), nic.get("mac") or "-", ",".join(nic.get("addresses") or ()) or "-")
        for nic in _items(info, "interfaces")
    )
    return output.table(("INTERFACE", "MAC", "ADDRESSES"), rows)


def _items(info: Info, part: str) -> Iterable[Info]:
    found: Iterable[Info] = info.get(part) or ()
    return found


_SECTIONS: dict[str, Callable[[Info], str]] = {
    "os": _os,
    "users": _users,
    "filesystems": _filesystems,
    "interfaces": _interfaces,
}
