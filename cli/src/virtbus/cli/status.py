"""Implements `virtbus status`."""

import time
from collections.abc import Mapping
from typing import Any

import click

from virtbus.cli import node as nodes
from virtbus.cli import output, units
from virtbus.cli.failures import CliError, unavailable
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.wire import message as bodies
from virtbus.cli.wire.protocol import WireMessage
from virtbus.cli.wire.session import Session

GATHER_S = 0.4
"""Time for services to answer $SRV.INFO (ADR-32).

The number of answers is unknown, so the command always waits for the full time.
"""
SKEW_ALARM_S = 2.0
FILL_ALARM = 0.8
"""From this fill of a stream on, controllers refuse to create VMs."""
AGE_ALARM_S = 60.0


@click.command(
    epilog=examples(
        """
        virtbus status
        virtbus status -o json | jq '.alarms'
        watch -n2 virtbus status
        """
    )
)
@verb
def command(invocation: Invocation) -> None:
    """Show the services, the bus and the nodes.

    The exit code is 5 if no controller answers, no node is ready, or a service of a node is
    missing. The known state is shown anyway.
    """
    services, server = _services(invocation.session), invocation.session.server
    failure: CliError | None = None
    bus: dict[str, Any] = {}
    try:
        bus = invocation.call("bus", "status", {})
        if bus.get("unlisted_nodes"):
            bus |= {"nodes": invocation.listed("node")["items"], "unlisted_nodes": 0}
    except CliError as error:
        failure = error
    value = {
        "server": {"name": server.get("server_name", ""), "version": server.get("version", "")},
        "highly_available": bool(bus.get("highly_available", False)),
        **bus,
        "services": services,
        "alarms": [*(bus.get("alarms") or ()), *_alarms(bus)],
    }
    invocation.show(value, lambda: _page(value))
    if failure is not None:
        raise failure
    if not any(node.get("state") == "ready" for node in bus.get("nodes") or ()):
        raise unavailable("no node is ready", "wait a moment; on each host: virtbus up")
    missing = [
        f"{report['name']} on {report['node']}"
        for report in _reported_services(value)
        if report["missing"]
    ]
    if missing:
        raise unavailable(
            f"not all services work: {', '.join(missing)}",
            "on that host: the output of `virtbus up`, or systemctl status of that service",
        )


def _reported_services(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return each service in the nodes' reports with its state, even without an answer."""
    listed = value.get("nodes") or ()
    answering = {(str(one["name"]), str(one["node"])) for one in value["services"]}
    found: list[dict[str, Any]] = []
    for node in listed:
        for service, report in sorted((node.get("services") or {}).items()):
            name = f"virtbus-{'nodeagent' if service == 'agent' else service}"
            where = str(node.get("node"))
            # An answer that names no node comes from this node, if the bus has no other node.
            here = (name, where) in answering or (len(listed) == 1 and (name, "") in answering)
            missing = _is_missing(report) and not here
            found.append(
                {
                    "name": name,
                    "node": where,
                    "state": "missing" if missing else str(report.get("state")),
                    "version": str(report.get("version") or ""),
                    "message": str(report.get("message") or ""),
                    "missing": missing,
                }
            )
    return found


def _is_missing(report: Mapping[str, Any]) -> bool:
    """Return True if the report is only the agent's error message, not the service's own report."""
    return (
        report.get("state") != "ready" and bool(report.get("message")) and not report.get("version")
    )


def _services(session: Session) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def receive(item: WireMessage) -> None:
        try:
            info = bodies.read(item.body)
        except bodies.UndecodableError:
            return
        if isinstance(info, Mapping):
            found.append(
                {
                    "name": info.get("name"),
                    "version": info.get("version"),
                    "id": info.get("id"),
                    "node": (info.get("metadata") or {}).get("node", ""),
                    "description": info.get("description", ""),
                }
            )

    reply = session.inbox(receive)
    session.publish("$SRV.INFO", b"", reply=reply)
    until = time.monotonic() + GATHER_S
    while (left_s := until - time.monotonic()) > 0:
        session.pump(left_s)
    session.forget(reply)
    return sorted(found, key=lambda one: (str(one["name"]), str(one["node"])))


def _alarms(bus: Mapping[str, Any]) -> list[str]:
    alarms = [
        f"stream {stream.get('name')} is {float(stream.get('fill') or 0):.0%} full:"
        " creates stop at 80 %; delete VMs or raise its limit"
        for stream in bus.get("streams") or ()
        if float(stream.get("fill") or 0) >= FILL_ALARM
    ]
    servers, current = int(bus.get("servers") or 0), int(bus.get("servers_current") or 0)
    if current < servers:
        alarms.append(
            f"{current} of {servers} NATS servers are there and up to date: bring the others back"
        )
    skew_s = float(bus.get("skew_s") or 0)
    if abs(skew_s) > SKEW_ALARM_S:
        alarms.append(f"clocks differ by {skew_s:.1f} s: is a time service running on all hosts?")
    alarms += [
        f"{service} on {node.get('node')} is {report.get('state')}: {report['message']}"
        for node in bus.get("nodes") or ()
        for service, report in sorted((node.get("services") or {}).items())
        if report.get("message")
    ]
    pending_s = _pending_s(bus)
    if pending_s is not None and pending_s > AGE_ALARM_S:
        alarms.append(f"a VM is pending for {units.duration(pending_s)}: see `virtbus vm list`")
    return alarms


def _pending_s(bus: Mapping[str, Any]) -> float | None:
    created_ns = bus.get("oldest_pending_created_ns")
    return None if not created_ns else max(0.0, (time.time_ns() - int(created_ns)) / units.NS)


def _page(value: Mapping[str, Any]) -> str:
    parts = [output.fields(_head(value))]
    rows = _service_rows(value)
    if rows:
        header = ("SERVICE", "NODE", "STATE", "VERSION", "INSTANCE", "MESSAGE")
        parts.append(output.table(header, rows))
    else:
        parts.append("no service answers; start them: virtbus up")
    if value.get("nodes"):
        parts.append(nodes.table(list(value["nodes"])))
    if value.get("streams"):
        parts.append(_streams(value["streams"]))
    parts += [f"alarm: {output.safe(alarm)}" for alarm in value["alarms"]]
    return "\n\n".join(parts)


def _service_rows(value: Mapping[str, Any]) -> list[tuple[str, ...]]:
    reported = {(one["name"], one["node"]): one for one in _reported_services(value)}
    rows: list[tuple[str, ...]] = []
    for service in value["services"]:
        name, node = str(service["name"]), str(service["node"])
        alike = [key for key in reported if key[0] == name]
        key = (name, node) if node or len(alike) != 1 else alike[0]
        known = reported.pop(key, None) or {"node": node, "state": "answers", "message": ""}
        rows.append(
            (
                name,
                known["node"] or "-",
                known["state"],
                str(service["version"] or "-"),
                str(service["id"])[:12],
                known["message"] or "",
            )
        )
    # An answer that names no node may come from any reported service of that name. So none of these
    # services counts as silent.
    unplaced = {str(service["name"]) for service in value["services"] if not service["node"]}
    for one in reported.values():
        silent = one["state"] == "ready" and one["name"] not in unplaced
        state = "silent" if silent else one["state"]
        rows.append((one["name"], one["node"], state, one["version"] or "-", "-", one["message"]))
    return sorted(rows)


def _head(value: Mapping[str, Any]) -> list[tuple[str, object]]:
    pending_s = _pending_s(value)
    states = value.get("vms") or {}
    replicated = (
        f"yes: highly available: {value.get('servers', 3)} servers"
        if value["highly_available"]
        else "no: not highly available, one NATS server"
    )
    return [
        ("Bus", f"{value['server']['name']} (nats-server {value['server']['version']})"),
        ("Replicated", replicated),
        ("VMs", ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "none"),
        ("Queue depth", value.get("queue_depth")),
        ("Without a node", value.get("unplaced")),
        ("Dead letters", value.get("dead_letters")),
        ("Oldest pending VM", "none" if pending_s is None else units.duration(pending_s)),
        ("Clock skew", f"{float(value.get('skew_s') or 0):.3f} s"),
    ]


def _streams(streams: list[Mapping[str, Any]]) -> str:
    rows = [
        (
            stream.get("name", ""),
            f"{float(stream.get('fill') or 0):.1%}",
            stream.get("messages", "-"),
            _consumers(stream.get("consumers")),
        )
        for stream in streams
    ]
    return output.table(("STREAM", "FULL", "MESSAGES", "CONSUMERS AND PENDING MESSAGES"), rows)


def _consumers(consumers: object) -> str:
    """Return `name:pending` of each consumer. `consumers` is a list, or only a number."""
    if not isinstance(consumers, list | tuple):
        return str(consumers or "-")
    texts = [
        f"{one.get('name')}:{one.get('pending', 0)}" if isinstance(one, Mapping) else str(one)
        for one in consumers
    ]
    return " ".join(texts) or "-"
