"""Implements `virtbus vm update`."""

from typing import Any

import click

from virtbus.cli.failures import usage
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.vm import request
from virtbus.cli.vm import view as views
from virtbus.cli.vm.get import fetch
from virtbus.cli.vm.target import name_argument, namespace_option


@click.command(
    epilog=examples(
        """
        virtbus vm update web --cpus 4 --memory 1GiB      from the next start of its guest on
        virtbus vm update web --protected
        virtbus vm update web --label tier=front --label stage=test
        virtbus vm get web -o yaml > web.yaml             change web.yaml, then
        virtbus vm update web -f web.yaml
        """
    )
)
@name_argument
@click.option(
    "--cpus",
    type=int,
    metavar="N",
    help="Virtual CPUs. Sockets and threads stay if sockets * threads divides N.",
)
@click.option("--memory", metavar="SIZE", help="Such as 512MiB or 2GiB.")
@click.option("--protected/--no-protected", default=None, help="Refuse deletes, or permit them.")
@click.option(
    "--label", "label_texts", multiple=True, metavar="K=V", help="Replaces all labels; repeatable."
)
@click.option(
    "-f", "--file", "file", metavar="FILE", help="YAML or JSON with spec or labels; - is stdin."
)
@namespace_option
@verb
def command(
    invocation: Invocation,
    *,
    name: str,
    namespace: str,
    file: str | None,
    label_texts: tuple[str, ...],
    **changes: Any,
) -> None:
    """Change the VM NAME.

    A change that a running guest cannot take waits for its next start. Meanwhile the VM shows
    RestartRequired; `virtbus vm restart NAME` applies the change. A field that cannot change is
    refused with its path. If the VM has changed since FILE was written, FILE is refused.
    """
    given = request.from_file(file) if file else {}
    if label_texts:
        given["labels"] = request.labels(label_texts)
    changed = {key: value for key, value in changes.items() if value is not None}
    if not changed and not given.keys() & {"spec", "labels"}:
        raise usage("nothing to change", "give --cpus, --memory, --protected, --label or --file")
    view = fetch(invocation, name, namespace)
    query: dict[str, Any] = {"uid": view["uid"]}
    query["revision"] = given.get("revision", view["revision"])
    query |= {key: given[key] for key in ("spec", "labels") if given.get(key) is not None}
    if changed:
        query["spec"] = _with(query.get("spec", view["spec"]), **changed)
    after = invocation.call("vm", "update", query)
    invocation.show(after, lambda: views.table([after]))


def _with(
    spec: dict[str, Any],
    cpus: int | None = None,
    memory: str | None = None,
    protected: bool | None = None,
) -> dict[str, Any]:
    """Return `spec` with the given values; None keeps the value of `spec`."""
    domain = dict(spec.get("domain") or {})
    if cpus is not None:
        domain["cpu"] = _with_cpus(domain.get("cpu") or {}, cpus)
    if memory is not None:
        domain["memory"] = {**(domain.get("memory") or {}), "guest": memory}
    kept = {} if protected is None else {"protected": protected}
    return {**spec, "domain": domain, **kept}


def _with_cpus(cpu: dict[str, Any], count: int) -> dict[str, Any]:
    """Return `cpu` with `count` vCPUs; keep sockets and threads if possible."""
    known = [cpu.get("sockets", 1), cpu.get("threads", 1)]
    sockets, threads = (one if isinstance(one, int) and one > 0 else 1 for one in known)
    cores, rest = divmod(count, sockets * threads)
    if rest:
        return {**cpu, "sockets": 1, "cores": count, "threads": 1}
    return {**cpu, "cores": cores}
