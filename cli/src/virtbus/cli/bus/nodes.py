"""Implements `virtbus bus add-node`, `revoke-node`, `remove-node`, `add-bridge`, `add-cri`."""

import asyncio
from pathlib import Path
from typing import Any

import click

from virtbus.bus.errors import DeniedError, UnavailableError
from virtbus.bus.provisioning.bus_directory import BusDirectory, BusPlan
from virtbus.bus.provisioning.config_reload import reload_servers
from virtbus.bus.provisioning.permissions import bridge, cri
from virtbus.bus.runtime.bus_settings import BusSettings
from virtbus.cli.bus.place import WAIT_S, answers, copy_hint, directory, knows, refusals, written
from virtbus.cli.failures import unavailable
from virtbus.cli.invocation import Invocation, local
from virtbus.cli.lazy import examples
from virtbus.schemas.ids import check_id


def reload(prepared: BusDirectory) -> list[str]:
    """Reload the servers; return the reloaded servers' names, empty if no server answers."""
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
    """Create an account and credentials for a host of VMs, and reload the servers.

    Servers that run from DIR reload at once. If servers run from a copy of DIR, copy accounts.conf
    to them and repeat this command. It lists the servers that do not know the node yet.
    """
    prepared = BusDirectory(Path(place))
    with refusals():
        changed = prepared.add_node(check_id(name))
    users = [f"{user}-{name}" for user in ("node", "imaged", "netd")]
    start = f"on {name}: virtbus node up --name {name} --creds node-{name}.creds"
    _added(invocation, prepared, {"node": name}, changed, users, start)


@click.command(epilog=examples("virtbus bus add-bridge east"))
@click.argument("cluster")
@directory
@local
def add_bridge(invocation: Invocation, cluster: str, place: str) -> None:
    """Create an account for the bridge of a further Kubernetes cluster.

    Every bus has the user `bridge` for its first cluster. Each bridge sees and changes only the VMs
    that its own account created, so two clusters never share a VM.
    """
    prepared = BusDirectory(Path(place))
    with refusals():
        changed = prepared.add_bridge(check_id(cluster))
    _added(invocation, prepared, {"bridge": cluster}, changed, [bridge(cluster).user])


@click.command(epilog=examples("virtbus bus add-cri n1"))
@click.argument("node")
@directory
@local
def add_cri(invocation: Invocation, node: str, place: str) -> None:
    """Create an account for the container runtime of a node that is a Kubernetes node, too.

    The runtime sees and changes only the VMs that it created: the VMs of the pods on its node.
    """
    prepared = BusDirectory(Path(place))
    with refusals():
        changed = prepared.add_cri(check_id(node))
    start = f"on {node}: copy the file to /etc/virtbus/cri.creds, then start virtbus-cri"
    _added(invocation, prepared, {"cri": node}, changed, [cri(node).user], start)


def _added(
    invocation: Invocation,
    prepared: BusDirectory,
    what: dict[str, str],
    changed: list[Path],
    users: list[str],
    *more: str,
) -> None:
    """Reload the servers, check that each accepts the first of `users`, and show the result."""
    with refusals():
        reloaded = reload(prepared)
        plan = prepared.plan()
        refusing = asyncio.run(knows(prepared, plan, users[0])) if reloaded else {}
    creds = [str(prepared.creds(user)) for user in users]
    value: dict[str, Any] = {**what, "changed": [str(path) for path in changed]}
    value |= {"credentials": creds, "reloaded": reloaded, "refusing": refusing}
    lines = [written(changed), *(f"credentials: {path}" for path in creds), *more]
    lines += copy_hint(prepared, plan, list(refusing))
    invocation.show(value, lambda: "\n".join(lines))
    _check_reloaded(reloaded)
    if refusing:
        raise unavailable(
            f"these servers do not know {users[0]} yet: {', '.join(refusing)}",
            "copy accounts.conf as above, then repeat this command",
        )


def _check_reloaded(reloaded: list[str], repeat: str = "repeat this command") -> None:
    if not reloaded:
        raise unavailable("no server answers, so none was reloaded", f"start them, then {repeat}")


@click.command(epilog=examples("virtbus bus remove-node n4"))
@click.argument("name")
@directory
@local
def remove_node(invocation: Invocation, name: str, place: str) -> None:
    """Remove a host's account: its credentials are refused and its connections end.

    Its VMs and their records stay; drain or fence the node first.
    """
    prepared = BusDirectory(Path(place))
    with refusals():
        there = name in prepared.plan().nodes
        changed = prepared.remove_node(name) if there else []
        if not there and not prepared.withdrawn(name).exists():
            invocation.show({"node": name, "changed": []}, lambda: written([]))
            return
    _end(invocation, prepared, name, changed, [])


@click.command(
    epilog=examples(
        """
        virtbus bus revoke-node n4
        virtbus bus revoke-node n4 --check      after the files are on the servers
        """
    )
)
@click.argument("name")
@click.option("--check", is_flag=True, help="Make no new keys; reload and check the servers again.")
@directory
@local
def revoke_node(invocation: Invocation, name: str, place: str, *, check: bool) -> None:
    """Replace a host's credentials: the old credentials are refused and their connections end.

    Use it for credentials that were stolen or are old. The host's VMs keep running. The host is
    silent until the new files are on it. If a server was not reached, repeat the command with
    --check. Without --check, each run makes new keys.
    """
    prepared = BusDirectory(Path(place))
    with refusals():
        changed = [] if check else prepared.renew_node(check_id(name))
    creds = [str(prepared.creds(f"{user}-{name}")) for user in ("node", "imaged", "netd")]
    _end(invocation, prepared, name, changed, creds)


def _end(
    invocation: Invocation, prepared: BusDirectory, name: str, changed: list[Path], creds: list[str]
) -> None:
    """Reload the servers, check that each refuses a host's old credentials, and show the result.

    `creds` are the host's new credentials; empty for a removed host.
    """
    repeat = "repeat this command" + (" with --check" if creds else "")
    with refusals():
        reloaded = reload(prepared)
        plan = prepared.plan()
        taking: dict[str, str] = {}
        if reloaded and creds:
            taking = asyncio.run(knows(prepared, plan, f"node-{name}"))
        elif reloaded:
            taking = asyncio.run(_taking(prepared, plan, name))
    value: dict[str, Any] = {"node": name, "changed": [str(path) for path in changed]}
    value |= {"reloaded": reloaded, "still_taking": [*taking], "credentials": creds}
    lines = [written(changed), *(f"credentials: {path}" for path in creds)]
    lines += copy_hint(prepared, plan, [*taking])
    invocation.show(value, lambda: "\n".join(lines))
    _check_reloaded(reloaded, repeat)
    if taking:
        whys = "; ".join(f"{server}: {why}" for server, why in taking.items())
        raise unavailable(
            f"these servers may still accept the old credentials of {name}: {whys}",
            f"start them, or copy accounts.conf as above; then {repeat}",
        )
    prepared.withdrawn(name).unlink(missing_ok=True)


async def _taking(prepared: BusDirectory, plan: BusPlan, name: str) -> dict[str, str]:
    """Return, by server, the reasons why servers may still accept a removed host's credentials.

    A server's refusal counts only if the server accepts the user `sys`. Without this check, an
    unreachable or untrusted server would look like a server that refuses.
    """
    if not prepared.withdrawn(name).exists():
        return {}
    found = await knows(prepared, plan, "sys")
    for server, error in (await answers(prepared, plan, f"withdrawn-{name}")).items():
        if not isinstance(error, DeniedError):
            found.setdefault(server, str(error or "it accepts them"))
    return found
