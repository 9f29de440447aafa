"""Implements `virtbus vm create`."""

import sys
from collections.abc import Mapping
from typing import Any

import click

from virtbus.bus.runtime.ids import uuid7
from virtbus.cli import completion_sources, units
from virtbus.cli.failures import CliError, Exit, unknown, usage
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.progress import Steps
from virtbus.cli.vm import request
from virtbus.cli.vm import view as views
from virtbus.cli.vm.span import RootSpan
from virtbus.cli.vm.target import namespace_option
from virtbus.cli.vm.waiting import WaitProgress
from virtbus.cli.wire.session import REQUEST_TIMEOUT_S

_ENDED = {"Failed", "Succeeded", "Stopped", "Deleting"}


@click.command(
    epilog=examples(
        """
        virtbus vm create web --image tiny
        virtbus vm create web --image tiny --cpus 2 --memory 512MiB --disk 4GiB --wait ready
        virtbus vm create web --image tiny --ssh-key ~/.ssh/id_ed25519.pub --user-data init.yaml
        virtbus vm create db --image tiny --volume data-1        its data outlives db
        virtbus vm create db --image tiny --new-volume db-data=10GiB
        virtbus vm create ci --new-volume ci-root=20GiB:debian/12 --delete-volumes
        virtbus vm create one --image debian/12 --new-volume cluster=50GiB --access shared
        virtbus vm create web --image debian --directory www=/srv/www:ro
        virtbus vm create web --image debian --publish 8080:80 --publish 192.0.2.7:53:53/udp
        virtbus vm create web --image tiny --network lab --address 10.9.1.7
        virtbus vm create -f vm.yaml --wait running -o json
        echo '{"name": "web", "image": "tiny"}' | virtbus vm create -f -

        vm.yaml has the same fields, and may have a whole spec:
        |   name: web
        |   image: tiny
        |   memory: 256MiB
        |   labels: {tier: front}
        |   spec: {eviction_strategy: "None"}   may be restarted on another host, from its image
        """
    )
)
@click.argument("name", required=False)
@click.option(
    "--image",
    metavar="REF",
    shell_complete=completion_sources.images,
    help="An image name or URL. It may end in @sha256:<digest>.",
)
@click.option(
    "--volume",
    "volumes",
    multiple=True,
    metavar="VOLUME[=DISK]",
    shell_complete=completion_sources.volumes,
    help="A volume that the VM holds until a detach or the VM's delete; repeatable.",
)
@click.option(
    "--new-volume",
    "new_volumes",
    multiple=True,
    metavar="VOLUME=SIZE[:IMAGE]",
    help="Make this volume with the VM, empty or from an image, unless it exists; repeatable.",
)
@click.option(
    "--delete-volumes",
    is_flag=True,
    help="Delete the volumes of --new-volume with the VM.  [default: they are retained]",
)
@click.option(
    "--access",
    type=click.Choice(["one", "shared"]),
    help="With shared, several VMs may hold the volumes of --new-volume.  [default: one]",
)
@click.option(
    "--directory",
    "directories",
    multiple=True,
    metavar="TAG=PATH[:ro]",
    help="A directory of the VM's host that the guest mounts by virtiofs as TAG; repeatable.",
)
@click.option("--cpus", type=int, metavar="N", help="Virtual CPUs.  [default: 1]")
@click.option("--memory", metavar="SIZE", help="Such as 256MiB or 2GiB.  [default: 256MiB]")
@click.option("--disk", metavar="SIZE", help="Size of the root disk, if larger than the image.")
@click.option(
    "--ssh-key",
    "keys",
    multiple=True,
    metavar="FILE|KEY",
    help="Public key; repeatable. It is for root in the image tiny, for debian in debian.",
)
@click.option("--user-data", metavar="FILE", help="cloud-init user data; - is standard input.")
@click.option(
    "--network",
    metavar="NAME",
    shell_complete=completion_sources.networks,
    help="Network to join.  [default: default]",
)
@click.option(
    "--address",
    "addresses",
    multiple=True,
    metavar="IP",
    help="A static IPv4 or IPv6 address of the network, for the first interface; repeatable.",
)
@click.option(
    "--publish",
    "published",
    multiple=True,
    metavar="[ADDR:]PORT:GUEST[/PROTO]",
    help="Port of the VM's host that leads to a port of the guest, such as 8080:80; repeatable.",
)
@click.option("--display", is_flag=True, help="A VGA display, for `vm vnc` and `vm screenshot`.")
@click.option("--protected", is_flag=True, help="Refuse deletes until `vm update` clears this.")
@click.option("--label", "label_texts", multiple=True, metavar="K=V", help="Label; repeatable.")
@click.option(
    "--uid", metavar="UUID", help=("A uid of your choice: the same command may then be repeated.")
)
@click.option("-f", "--file", "file", metavar="FILE", help="YAML or JSON with the VM; - is stdin.")
@click.option(
    "--wait",
    "goal",
    type=click.Choice(("running", "ready")),
    help="Wait until the domain runs, or until the guest answers pings or reports that it is up.",
)
@click.option("--timeout", default=300.0, show_default=True, metavar="S", help="Time limit.")
@namespace_option
@verb
def command(
    invocation: Invocation,
    *,
    name: str | None,
    goal: str | None,
    timeout: float,
    **flags: Any,
) -> None:
    """Create the VM NAME from an image.

    The command returns when the VM is accepted (stored durably), or with --wait when the VM runs or
    is ready. While waiting, it shows each step with its time. An interrupted wait does not stop the
    create.

    If no node has enough free capacity, the VM is Pending until a node has it. A VM that would not
    fit on any empty node is refused.
    """
    wanted = _wanted(name, flags)
    create = _Create(invocation, wanted, goal, timeout)
    view, created = create.run()
    if not created:
        invocation.note(f"{view.get('name')} was there already, unchanged")
    invocation.show(view, lambda: views.table([view]))
    if not goal and views.node(view) == "-":
        invocation.note(f"it is Pending: {view.get('message')}")
    if not goal:
        invocation.note(f"accepted; follow it with: virtbus vm events {view.get('name')} --follow")


def _wanted(name: str | None, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request (a `VmCreate` as a map) for the command line and its files."""
    if flags["file"] == "-" and flags["user_data"] == "-":
        raise usage("only one of --file and --user-data can be standard input")
    base = request.from_file(flags["file"]) if flags["file"] else {}
    source = click.get_current_context().get_parameter_source("namespace")
    named = source is click.core.ParameterSource.COMMANDLINE
    given = {
        "name": name,
        "namespace": flags["namespace"] if flags["namespace"] != "default" or named else None,
        "uid": flags["uid"],
        "labels": request.labels(flags["label_texts"]),
        "ssh_keys": request.ssh_keys(flags["keys"]),
        "user_data": request.read_text(flags["user_data"], "--user-data")
        if flags["user_data"]
        else None,
    }
    given |= {word: flags[word] for word in ("image", "cpus", "memory", "disk", "network")}
    wanted = request.merge(base, given)
    if spec := request.with_volumes(wanted.get("spec"), flags):
        wanted["spec"] = spec
    if not wanted.get("name"):
        raise usage("NAME is missing", "virtbus vm create NAME --image tiny")
    if not wanted.get("image") and not wanted.get("spec"):
        raise usage("--image is missing", "`virtbus image list` shows what nodes have; try tiny")
    if flags["display"]:
        domain = wanted.setdefault("spec", {}).setdefault("domain", {})
        domain.setdefault("devices", {})["autoattach_graphics_device"] = True
    if flags["protected"]:
        wanted.setdefault("spec", {})["protected"] = True
    request.with_directories(wanted, flags["directories"])
    ports = request.published(flags["published"])
    request.with_nic(wanted, publish=ports, addresses=flags["addresses"])
    wanted.setdefault("uid", uuid7())
    return wanted


class _Create:
    """Sends one create request, and waits for the VM if `goal` is set."""

    def __init__(
        self, invocation: Invocation, wanted: dict[str, Any], goal: str | None, timeout_s: float
    ) -> None:
        self._invocation = invocation
        self._wanted = wanted
        self._goal = goal
        self._timeout_s = timeout_s
        self._span = RootSpan("vm create")
        self._steps = Steps(shown=goal is not None and _steps_shown(invocation))
        self._uid = str(wanted["uid"]).lower()

    def run(self) -> tuple[Mapping[str, Any], bool]:
        ok = False
        session = self._invocation.session
        self._waiting = waiting = WaitProgress(session, self._uid, self._steps)
        try:
            if self._goal:
                waiting.listen()
            self._steps.restart_clock()
            answer = self._accepted()
            view: Mapping[str, Any] = answer.get("vm") or {}
            if self._goal:
                view = self._waited(waiting, view)
            ok = True
            return view, bool(answer.get("created", True))
        except KeyboardInterrupt:
            name = self._wanted["name"]
            self._invocation.note(f"\nno longer waiting; {name} continues: virtbus vm get {name}")
            raise
        finally:
            self._steps.close()
            attributes = {"virtbus.uid": self._uid, "virtbus.name": str(self._wanted["name"])}
            self._span.finish(session, ok=ok, attributes=attributes)

    def _accepted(self) -> dict[str, Any]:
        timeout_s = min(self._timeout_s, REQUEST_TIMEOUT_S)
        answer = self._invocation.call(
            "vm", "create", self._wanted, timeout_s=timeout_s, headers=self._span.headers
        )
        for one in answer.get("warnings") or ():
            self._invocation.note(f"warning: {one.get('path')}: {one.get('message')}")
        # If the VM existed already, the answer has that VM's uid.
        self._uid = str((answer.get("vm") or {}).get("uid") or self._uid)
        return answer

    def _waited(self, waiting: WaitProgress, view: Mapping[str, Any]) -> Mapping[str, Any]:
        reached = waiting.until(self._verdict, self._timeout_s - self._steps.elapsed_s)
        seen = waiting.view or view
        if not reached:
            raise _timed_out(seen, str(self._goal), self._timeout_s)
        where = ", ".join(views.addresses(seen))
        self._steps.step(str(self._goal), " ".join(("on", views.node(seen), where)).strip())
        return seen

    def _verdict(self, view: Mapping[str, Any] | None) -> bool:
        if view is None:
            # The controller may not have read the new VM's record yet.
            if self._waiting.was_seen:
                raise CliError(
                    Exit.REFUSED, "deleted", f"{self._wanted['name']} was deleted meanwhile"
                )
            return False
        if view.get("deleting") or views.state(view) == "Deleting":
            raise CliError(Exit.REFUSED, "deleted", f"{view.get('name')} was deleted meanwhile")
        if views.state(view) in _ENDED:
            raise _ended(view)
        if views.state(view) != "Running":
            return False
        ready = views.condition(view, "Ready")
        return self._goal == "running" or bool(ready and ready.get("status"))


def _steps_shown(invocation: Invocation) -> bool:
    """Return True for tables. For JSON and YAML, return True if stderr is a terminal."""
    return invocation.for_eyes or sys.stderr.isatty()


def _ended(view: Mapping[str, Any]) -> CliError:
    name, state = view.get("name"), views.state(view)
    why = str(view.get("message") or view.get("reason") or "no reason is known")
    details = [
        {"path": str(c.get("type")), "message": str(c.get("message") or c.get("reason"))}
        for c in view.get("conditions") or ()
        if not c.get("status") and (c.get("message") or c.get("reason"))
    ]
    return CliError(
        Exit.REFUSED,
        str(view.get("reason") or state.lower()),
        f"{name} is {state}: {why}",
        details=details,
        hint=f"`virtbus vm events {name}` shows each step; `virtbus vm delete {name}` removes it",
    )


def _timed_out(view: Mapping[str, Any], goal: str, timeout_s: float) -> CliError:
    name = view.get("name")
    why = str(view.get("message") or view.get("reason") or "")
    if views.state(view) == "Running":
        why = "the domain runs, but the guest has not said that it is up"
    return unknown(
        f"{name} is not {goal} after {units.duration(timeout_s)}; it is {views.state(view)}"
        + (f": {why}" if why else ""),
        f"it continues by itself: `virtbus vm get {name}`, `virtbus vm logs {name}`",
    )
