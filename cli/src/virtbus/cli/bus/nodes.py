"""`virtbus bus add-node` and `virtbus bus remove-node`."""

import asyncio
from pathlib import Path
from typing import Any

import click

from virtbus.bus.access import BusSettings
from virtbus.bus.ports import BusError, UnavailableError
from virtbus.bus.prepared import Prepared
from virtbus.bus.reloading import reload_servers
from virtbus.cli.bus.place import WAIT_S, copy_hint, directory, knows, refusals, written
from virtbus.cli.failures import unavailable
from virtbus.cli.invocation import Invocation, local
from virtbus.cli.lazy import examples
from virtbus.schemas.ids import check_id


def reload(prepared: Prepared) -> list[str]:
    """Let servers read their files; the names of those that did, none where none answers."""
    settings = BusSettings(creds=prepared.creds("sys"), connect_timeout_s=WAIT_S)
    try:
        return asyncio.run(reload_servers(settings))
    except UnavailableError:
        return []


@click.command(
    epilog=examples(
        """
        virtbus bus add-node n4
        virtbus bus add-node n4 --dir bus       again, after the files are on the servers
        """
    )
)
@click.argument("name")
@directory
@local
def add_node(invocation: Invocation, name: str, place: str) -> None:
    """Give a host of VMs its account and credentials, and let the servers know.

    Servers that run from DIR read it at once. Where they run from a copy, bring them accounts.conf
    and repeat this command: it says which servers do not know the node yet.
    """
    prepared = Prepared(Path(place))
    with refusals():
        changed = prepared.add_node(check_id(name))
        reloaded = reload(prepared)
        plan = prepared.plan()
        refusing = asyncio.run(knows(prepared, plan, f"node-{name}")) if reloaded else {}
    creds = [str(prepared.creds(f"{user}-{name}")) for user in ("node", "imaged", "netd")]
    told: dict[str, Any] = {"node": name, "changed": [str(path) for path in changed]}
    told |= {"credentials": creds}
    told |= {"reloaded": reloaded, "refusing": refusing}
    lines = [written(changed), *(f"credentials: {path}" for path in creds)]
    lines.append(f"on {name}: virtbus node up --name {name} --creds node-{name}.creds")
    lines += copy_hint(prepared, plan, list(refusing))
    invocation.show(told, lambda: "\n".join(lines))
    if not reloaded:
        raise unavailable("no server answers, so none was reloaded", "start them, then repeat this")
    if refusing:
        raise unavailable(
            f"these servers do not know {name} yet: {', '.join(refusing)}",
            "copy accounts.conf as above, then repeat this command",
        )


@click.command(epilog=examples("virtbus bus remove-node n4"))
@click.argument("name")
@directory
@local
def remove_node(invocation: Invocation, name: str, place: str) -> None:
    """Take a host's account away: its credentials open nothing any more, its connections end.

    Its VMs and their records stay; drain or fence the node first.
    """
    prepared = Prepared(Path(place))
    with refusals():
        if name not in prepared.plan().nodes:
            invocation.show({"node": name, "changed": []}, lambda: written([]))
            return
        old = prepared.creds(f"node-{name}")
        kept = old.read_bytes() if old.exists() else b""
        changed = prepared.remove_node(name)
        reloaded = reload(prepared)
        plan = prepared.plan()
        taking = asyncio.run(_still_taking(prepared, kept, name)) if reloaded else []
    told = {"node": name, "changed": [str(path) for path in changed], "reloaded": reloaded}
    lines = [written(changed), *copy_hint(prepared, plan, taking)]
    invocation.show(told | {"still_taking": taking}, lambda: "\n".join(lines))
    if not reloaded:
        raise unavailable("no server answers, so none was reloaded", "start them, or reload them")
    if taking:
        raise unavailable(
            f"these servers still let {name} in: {', '.join(taking)}",
            "copy accounts.conf as above, then on each: nats-server --signal reload",
        )


async def _still_taking(prepared: Prepared, creds: bytes, name: str) -> list[str]:
    """The servers that still take the credentials which were just withdrawn."""
    if not creds:
        return []
    file = prepared.creds(f"withdrawn-{name}")
    file.touch(mode=0o600)
    try:
        file.write_bytes(creds)
        plan = prepared.plan()
        refusing = await knows(prepared, plan, f"withdrawn-{name}")
        return [names[0] for names in plan.servers if names[0] not in refusing]
    except BusError:
        return []
    finally:
        file.unlink()
