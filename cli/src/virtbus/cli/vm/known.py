"""Names of VMs for shell completion: quick, and silent where there is no bus."""

import os
from typing import Any

import click
from click.shell_completion import CompletionItem

from virtbus.cli.failures import CliError
from virtbus.cli.wire import access
from virtbus.cli.wire.session import Session

_TIMEOUT_S = 1.0
_MOST = 200


def complete_names(ctx: click.Context, incomplete: str) -> list[CompletionItem]:
    """The VMs of the namespace whose names start so, with their states as help."""
    params = ctx.params | {k: v for k, v in ctx.find_root().params.items() if v}
    try:
        session = Session(access.find(params.get("server"), params.get("creds"), os.environ))
        namespace = params.get("namespace") or os.environ.get("VIRTBUS_NAMESPACE", "default")
        query: dict[str, Any] = {"namespace": namespace, "limit": _MOST}
        page = session.request("virtbus.api.v1.vm.list", query, timeout_s=_TIMEOUT_S)
        session.close()
    except CliError:
        return []
    return [
        CompletionItem(str(vm["name"]), help=str(vm.get("state", "")))
        for vm in page.get("items") or ()
        if str(vm.get("name", "")).startswith(incomplete)
    ]
