"""Implements `virtbus imagename set|list|get|delete`."""

from collections.abc import Mapping, Sequence
from typing import Any

import click

from virtbus.cli import completion_sources, output, units
from virtbus.cli.invocation import PAGE, Invocation, verb
from virtbus.cli.lazy import LazyGroup, examples
from virtbus.cli.vm.target import namespace_filter, namespace_option

_HERE = "virtbus.cli.imagename"
HEADER = ("NAMESPACE", "NAME", "URL", "DIGEST", "TRANSPORT", "PULL", "GENERATION")
FLEET = "_"


@click.group(
    cls=LazyGroup,
    verbs={
        "set": (f"{_HERE}:set_name", "Make an image name, or change it."),
        "list": (f"{_HERE}:listing", "List image names."),
        "get": (f"{_HERE}:get", "Show one image name."),
        "delete": (f"{_HERE}:delete", "Remove image names."),
    },
    epilog=examples(
        """
        virtbus imagename set debian/12 https://images.example/bookworm.qcow2
        virtbus vm create web --image debian/12
        virtbus imagename list
        """
    ),
)
def command() -> None:
    """Manage image names: each maps a name such as debian/12 to a URL, for all nodes.

    A name belongs to a namespace, or to the whole fleet. When a VM is created, its image's name is
    looked up in the VM's namespace, then in the fleet, then in images.d of its node. The VM keeps
    the result (its image target), so a changed name affects new VMs only.

    `virtbus image` manages the images themselves, in the nodes' stores.
    """


def _scoped(function: Any) -> Any:
    fleet = click.option(
        "--fleet",
        is_flag=True,
        help="The name is of the whole fleet. Only the credentials of admin change it (--creds).",
    )
    return fleet(namespace_option(function))


def _name(function: Any) -> Any:
    return click.argument("name", shell_complete=completion_sources.image_names)(function)


def _asked(name: str, namespace: str, *, fleet: bool) -> dict[str, Any]:
    return {"name": name, "namespace": FLEET if fleet else namespace}


@click.command(
    name="set",
    epilog=examples(
        """
        virtbus imagename set debian/12 https://images.example/bookworm.qcow2 --digest sha256:…
        virtbus imagename set corp/base https://images.corp.example/base.qcow2 --transport corp
        virtbus imagename set ci/runner docker://registry.example/runner:3 --pull-policy Always
        virtbus --creds admin.creds imagename set debian/12 https://… --fleet
        """
    ),
)
@_name
@click.argument("url")
@click.option("--digest", metavar="SHA256", help="The only accepted content: sha256:<64 digits>.")
@click.option(
    "--transport",
    metavar="NAME",
    help="A transport in images.d of the nodes. It must list the URL's server in "
    "image_name_servers.",
)
@click.option(
    "--pull-policy",
    type=click.Choice(["Always", "IfNotPresent", "Never"]),
    default="IfNotPresent",
    show_default=True,
    help="Ask the server at each create, only if the node lacks the image, or never.",
)
@click.option(
    "--revision",
    type=click.IntRange(min=0),
    metavar="N",
    help="Change only if the name still has this revision; 0: only if it does not exist.",
)
@_scoped
@verb
def set_name(
    invocation: Invocation, *, name: str, url: str, namespace: str, fleet: bool, **flags: Any
) -> None:
    """Let NAME stand for URL (https://, http://, docker:// or file://) from now on.

    The command may be repeated. It replaces all fields of an existing name. Existing VMs keep their
    disks. A URL must have no query, because a query may contain a secret.
    """
    spec = {"url": url, "pull_policy": flags["pull_policy"]}
    spec |= {word: flags[word] for word in ("digest", "transport") if flags[word]}
    asked = _asked(name, namespace, fleet=fleet) | {"spec": spec}
    if flags["revision"] is not None:
        asked["revision"] = flags["revision"]
    view = invocation.call("imagename", "set", asked)
    invocation.show(view, lambda: table([view]))


@click.command(
    name="list",
    epilog=examples(
        """
        virtbus imagename list
        virtbus imagename list -n shop
        virtbus imagename list --fleet -o json | jq -r '.items[].spec.url'
        """
    ),
)
@namespace_filter
@click.option("--fleet", is_flag=True, help="Only names of the whole fleet.")
@verb
def listing(invocation: Invocation, *, namespace: str | None, fleet: bool) -> None:
    """List the image names on the bus. Names in images.d of nodes are not listed."""
    query: dict[str, Any] = {"limit": PAGE}
    if fleet or namespace:
        query["namespace"] = FLEET if fleet else namespace
    items = invocation.listed("imagename", query)["items"]
    invocation.show({"items": items}, lambda: table(items))


@click.command(epilog=examples("virtbus imagename get debian/12 -o yaml"))
@_name
@_scoped
@verb
def get(invocation: Invocation, *, name: str, namespace: str, fleet: bool) -> None:
    """Show the image name NAME."""
    view = invocation.call("imagename", "get", _asked(name, namespace, fleet=fleet))
    invocation.show(view, lambda: table([view]))


@click.command(
    epilog=examples("virtbus imagename delete debian/12\nvirtbus imagename delete a b -n shop")
)
@click.argument("names", nargs=-1, required=True, shell_complete=completion_sources.image_names)
@_scoped
@verb
def delete(invocation: Invocation, *, names: tuple[str, ...], namespace: str, fleet: bool) -> None:
    """Remove image names. VMs, their disks and stored images stay.

    Afterwards the fleet, or images.d of a node, may still give the name another meaning.
    """
    gone = [
        invocation.call("imagename", "delete", _asked(name, namespace, fleet=fleet))
        for name in dict.fromkeys(names)
    ]
    lines = "\n".join(f"{output.safe(one.get('name'))} deleted" for one in gone)
    invocation.show({"items": gone}, lambda: lines)


def table(views: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of image names."""
    return output.table(HEADER, [_row(view) for view in views])


def _row(view: Mapping[str, Any]) -> tuple[str, ...]:
    spec = view.get("spec") or {}
    namespace = str(view.get("namespace", ""))
    return (
        "(fleet)" if namespace == FLEET else namespace,
        str(view.get("name", "")),
        str(spec.get("url") or ""),
        units.digest(str(spec.get("digest") or "-")),
        str(spec.get("transport") or "-"),
        str(spec.get("pull_policy") or "IfNotPresent"),
        str(view.get("generation", "")),
    )
