"""Implements `virtbus security-group create|list|get|update|delete`."""

from collections.abc import Mapping, Sequence
from typing import Any

import click

from virtbus.bus.runtime.ids import uuid7
from virtbus.cli import completion_sources, output
from virtbus.cli.failures import usage
from virtbus.cli.invocation import PAGE, Invocation, verb
from virtbus.cli.lazy import LazyGroup, examples
from virtbus.cli.named_deletes import delete_named
from virtbus.cli.vm import request
from virtbus.cli.vm.target import namespace_filter, namespace_option

_HERE = "virtbus.cli.security_group"
HEADER = ("NAMESPACE", "NAME", "SELECTS", "VMS", "ISOLATES", "RULES")
RESOURCE = "security-group"
DIRECTIONS = ("ingress", "egress")
_GROUP = "group:"
_RULE = """A rule: PROTOCOL[:PORTS][@PEERS], such as tcp:80,8000-8080@10.0.0.0/8,group:lb"""


@click.group(
    cls=LazyGroup,
    verbs={
        "create": (f"{_HERE}:create", "Make a security group."),
        "list": (f"{_HERE}:listing", "List the security groups."),
        "get": (f"{_HERE}:get", "Show one group with its rules and members."),
        "update": (f"{_HERE}:update", "Change the selector, rules or labels of a group."),
        "delete": (f"{_HERE}:delete", "End groups and their rules."),
    },
    epilog=examples(
        """
        virtbus security-group create web --select app=web --ingress tcp:80,443
        virtbus security-group create db --select app=db --ingress tcp:5432@group:web
        virtbus security-group list
        """
    ),
)
def command() -> None:
    """Manage security groups: rules about the connections of VMs with certain labels.

    A VM without a group is open, except on networks with --default-deny. A VM in a group with
    ingress rules accepts only the connections that some rule allows. Egress rules limit the
    connections that a VM opens. Answers in an allowed connection always pass. Rules apply to
    running VMs within a second. The removal of a rule ends the connections that only this rule
    allowed.
    """


def _name(function: Any) -> Any:
    return click.argument("name", shell_complete=completion_sources.security_groups)(function)


def _rules_options(function: Any) -> Any:
    for option in reversed(
        (
            click.option(
                "--select",
                "selects",
                multiple=True,
                metavar="K=V",
                help="Label of the VMs that the group selects; repeatable.",
            ),
            click.option("--all-vms", is_flag=True, help="Select all VMs of the namespace."),
            click.option("--ingress", multiple=True, metavar="RULE", help=f"{_RULE}; repeatable."),
            click.option("--egress", multiple=True, metavar="RULE", help="As --ingress."),
            click.option(
                "--isolate",
                "isolates",
                multiple=True,
                type=click.Choice(DIRECTIONS),
                help="Deny what no rule allows; repeatable.  [default: each direction with rules]",
            ),
            click.option(
                "--file",
                "spec_file",
                metavar="FILE",
                help="A file with the whole spec, in place of the options above; - is stdin.",
            ),
        )
    ):
        function = option(function)
    return function


@click.command(
    epilog=examples(
        """
        virtbus security-group create web --select app=web --ingress tcp:80,443 --ingress icmp
        virtbus security-group create db --select app=db --ingress tcp:5432@group:web,10.9.0.0/16
        virtbus security-group create shut --all-vms --isolate ingress --isolate egress
        virtbus security-group create web --file ./web.yaml
        """
    )
)
@click.argument("name")
@_rules_options
@click.option(
    "--label", "label_texts", multiple=True, metavar="K=V", help="Label of the group; repeatable."
)
@click.option(
    "--uid", metavar="UUID", help="A uid of your choice: the same command may then be repeated."
)
@namespace_option
@verb
def create(invocation: Invocation, *, name: str, namespace: str, **flags: Any) -> None:
    """Make the security group NAME. It selects VMs of its namespace by their labels.

    A rule without peers allows everybody. A peer is an IPv4 or IPv6 network, or `group:NAME` for
    the members of a group of the same namespace.
    """
    spec = _spec(flags)
    if "selector" not in spec:
        raise usage("no VM is selected", "give --select K=V, or --all-vms")
    wanted = {
        "name": name,
        "namespace": namespace,
        "uid": flags["uid"] or uuid7(),
        "spec": spec,
        "labels": request.labels(flags["label_texts"]),
    }
    answer = invocation.call(RESOURCE, "create", wanted)
    view = answer.get("group") or {}
    if not answer.get("created"):
        invocation.note(f"{name} was there already, unchanged")
    _shown(invocation, view)


def _spec(flags: Mapping[str, Any]) -> dict[str, Any]:
    given = [word for word in ("selects", "all_vms", *DIRECTIONS, "isolates") if flags[word]]
    if flags["spec_file"] is not None:
        if given:
            raise usage("--file has the whole spec", "leave out the other options, or --file")
        return request.from_file(flags["spec_file"], "selector, rules", "security-group create")
    if flags["selects"] and flags["all_vms"]:
        raise usage("--all-vms selects all VMs", "leave out --select, or --all-vms")
    spec: dict[str, Any] = {}
    if flags["selects"] or flags["all_vms"]:
        spec["selector"] = {"labels": request.labels(flags["selects"])}
    rules = [_rule(direction, text) for direction in DIRECTIONS for text in flags[direction]]
    if rules:
        spec["rules"] = rules
    if flags["isolates"]:
        spec["isolates"] = list(dict.fromkeys(flags["isolates"]))
    return spec


def _rule(direction: str, text: str) -> dict[str, Any]:
    """Return a rule from its text. The controller checks protocol, ports and peers."""
    what, at, peers = text.partition("@")
    protocol, _, ports = what.partition(":")
    if not protocol or (at and not peers):
        raise usage(f"--{direction} {text} is no rule", "such as tcp:80@10.0.0.0/8")
    rule: dict[str, Any] = {"direction": direction, "protocol": protocol}
    if ports:
        rule["ports"] = ports.split(",")
    named = [one for one in peers.split(",") if one]
    groups = [one.removeprefix(_GROUP) for one in named if one.startswith(_GROUP)]
    cidrs = [one for one in named if not one.startswith(_GROUP)]
    return rule | ({"groups": groups} if groups else {}) | ({"cidrs": cidrs} if cidrs else {})


@click.command(
    name="list",
    epilog=examples(
        """
        virtbus security-group list
        virtbus security-group list -n shop -o json
        """
    ),
)
@namespace_filter
@click.option("--label", "label_texts", multiple=True, metavar="K=V", help="Label; repeatable.")
@verb
def listing(invocation: Invocation, *, namespace: str | None, label_texts: tuple[str, ...]) -> None:
    """List the security groups with the number of VMs that each group selects."""
    query: dict[str, Any] = {"labels": request.labels(label_texts), "limit": PAGE}
    if namespace:
        query["namespace"] = namespace
    items = invocation.listed(RESOURCE, query)["items"]
    invocation.show({"items": items}, lambda: table(items))


@click.command(epilog=examples("virtbus security-group get web -o yaml"))
@_name
@namespace_option
@verb
def get(invocation: Invocation, *, name: str, namespace: str) -> None:
    """Show the security group NAME, each rule on a line, and the first VMs that it selects."""
    view = invocation.call(RESOURCE, "get", {"name": name, "namespace": namespace})
    _shown(invocation, view)


def _shown(invocation: Invocation, view: Mapping[str, Any]) -> None:
    invocation.show(view, lambda: details(view))
    if view.get("message"):
        invocation.note(f"{view['message']}: it has no members until it exists")


@click.command(
    epilog=examples(
        """
        virtbus security-group update web --ingress tcp:80 --ingress tcp:22@10.0.0.0/8
        virtbus security-group update web --select app=web --select tier=front
        """
    )
)
@_name
@_rules_options
@click.option("--no-rules", is_flag=True, help="Remove all rules.")
@click.option(
    "--label", "label_texts", multiple=True, metavar="K=V", help="Replaces all labels; repeatable."
)
@namespace_option
@verb
def update(invocation: Invocation, *, name: str, namespace: str, **flags: Any) -> None:
    """Change the security group NAME.

    A given option replaces all its former values. So --ingress replaces the ingress rules only, and
    the egress rules stay. To remove all rules of one direction, give a spec without these rules in
    a --file.
    """
    asked = {"name": name, "namespace": namespace}
    given = _spec(flags)
    if flags["no_rules"]:
        if "rules" in given:
            raise usage("--no-rules removes all rules", "leave out the rules, or --no-rules")
        given["rules"] = []
    labels = request.labels(flags["label_texts"])
    if not given and not labels:
        raise usage("nothing to change", "give --ingress, --egress, --select or --label")
    changes: dict[str, Any] = {"labels": labels} if labels else {}
    if given:
        there = invocation.call(RESOURCE, "get", asked)
        spec = there.get("spec") or {}
        if replaced := [direction for direction in DIRECTIONS if flags[direction]]:
            rules = spec.get("rules") or ()
            given["rules"] += [one for one in rules if one.get("direction") not in replaced]
        spec = given if flags["spec_file"] is not None else spec | given
        changes |= {"spec": spec, "revision": there.get("revision")}
    _shown(invocation, invocation.call(RESOURCE, "update", asked | changes))


@click.command(epilog=examples("virtbus security-group delete web\n"))
@click.argument("names", nargs=-1, required=True, shell_complete=completion_sources.security_groups)
@namespace_option
@verb
def delete(invocation: Invocation, *, names: tuple[str, ...], namespace: str) -> None:
    """End security groups. A VM in no other group is open again."""
    asked = [{"name": name, "namespace": namespace} for name in dict.fromkeys(names)]
    delete_named(invocation, RESOURCE, asked, wait_s=10.0)


def table(views: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of groups."""
    return output.table(HEADER, [_row(view) for view in views])


def details(view: Mapping[str, Any]) -> str:
    """Return a group's row, its rules and its first members."""
    spec = view.get("spec") or {}
    lines = [table([view]), *(f"  {rule_text(rule)}" for rule in spec.get("rules") or ())]
    members = [output.safe(name) for name in view.get("members") or ()]
    if members:
        more = ", …" if len(members) < int(view.get("member_count") or 0) else ""
        lines.append(f"  members: {', '.join(members)}{more}")
    return "\n".join(lines)


def _row(view: Mapping[str, Any]) -> tuple[str, ...]:
    spec = view.get("spec") or {}
    return (
        str(view.get("namespace", "")),
        str(view.get("name", "")),
        selector_text(spec.get("selector") or {}),
        str(view.get("member_count") or 0),
        ", ".join(view.get("isolates") or ()) or "-",
        str(len(spec.get("rules") or ())),
    )


def selector_text(selector: Mapping[str, Any]) -> str:
    """Return a selector in kubectl's notation."""
    words = {"In": "in", "NotIn": "notin"}
    parts = [f"{key}={value}" for key, value in sorted((selector.get("labels") or {}).items())]
    for one in selector.get("expressions") or ():
        key, operator = one.get("key"), str(one.get("operator"))
        if operator in words:
            parts.append(f"{key} {words[operator]} ({', '.join(one.get('values') or ())})")
        else:
            parts.append(f"{key}" if operator == "Exists" else f"!{key}")
    return ",".join(parts) or "(all)"


def rule_text(rule: Mapping[str, Any]) -> str:
    """Return a rule's direction, and the rule in the notation of --ingress and --egress."""
    ports = ",".join(rule.get("ports") or ())
    peers = [*(rule.get("cidrs") or ()), *(f"{_GROUP}{one}" for one in rule.get("groups") or ())]
    what = f"{rule.get('protocol') or 'any'}{':' if ports else ''}{ports}"
    return f"{rule.get('direction')} {what}{'@' if peers else ''}{','.join(map(str, peers))}"
