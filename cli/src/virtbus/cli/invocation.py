"""Gives each verb its context: output style, connection, and the shared options."""

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

import click

from virtbus.cli import output
from virtbus.cli.wire import access
from virtbus.cli.wire.session import REQUEST_TIMEOUT_S, Session

if TYPE_CHECKING:
    from virtbus.bus.runtime.bus_settings import BusSettings

P = ParamSpec("P")
STYLES = ("table", "json", "yaml")
PAGE = 500
"""The largest page of a list with a `limit`."""


class Invocation:
    """The context of one call of a verb. The first use of `session` makes the connection."""

    def __init__(self, style: str, server: str | None, creds: str | None) -> None:
        self.style = style
        self._server = server
        self._creds = creds
        self._session: Session | None = None

    @property
    def session(self) -> Session:
        """Return the connection to the bus.

        Raises:
            CliError: no bus or credentials were found.
        """
        if self._session is None:
            self._session = Session(access.find(self._server, self._creds, os.environ))
        return self._session

    def admin(self) -> "BusSettings":
        """Return settings for a connection as the bus's admin.

        The credentials are the file of --creds, or the admin's file from `virtbus up`.
        """
        from virtbus.bus.runtime.bus_settings import (
            BusSettings,  # few verbs need the services' own client
        )

        server = self._server or os.environ.get("VIRTBUS_SERVER", "")
        run_dir = Path(os.environ.get("VIRTBUS_RUN_DIR") or access.DEFAULT_RUN_DIR)
        creds = Path(self._creds) if self._creds else None
        return BusSettings.found(run_dir, "admin", server=server, creds=creds)

    def client(self) -> "BusSettings":
        """Return settings for the services' bus client, with the bus and login of `session`.

        Raises:
            CliError: no bus or credentials were found.
        """
        from virtbus.bus.runtime.bus_settings import (
            BusSettings,  # few verbs need the services' own client
        )

        found = access.find(self._server, self._creds, os.environ)
        return BusSettings(
            url=",".join(address.url for address in found.servers),
            user=found.user or found.servers[0].user,
            password=found.password or found.servers[0].password,
            nkey_seed=found.nkey_seed,
            ca=found.ca,
            inbox_prefix=found.inbox_prefix,
        )

    @property
    def environ(self) -> dict[str, str]:
        """The environment for a child `virtbus` process on the same bus."""
        given = {"VIRTBUS_SERVER": self._server, "VIRTBUS_CREDS": self._creds}
        return dict(os.environ) | {name: value for name, value in given.items() if value}

    @property
    def for_eyes(self) -> bool:
        """True if a person reads the output (style table)."""
        return self.style == "table"

    def call(
        self,
        resource: str,
        verb: str,
        data: Mapping[str, Any],
        *,
        timeout_s: float = REQUEST_TIMEOUT_S,
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Send a request to `virtbus.api.v1.<resource>.<verb>`; return the answer's data.

        Raises:
            CliError: the request failed or was refused.
        """
        subject = f"virtbus.api.v1.{resource}.{verb}"
        return self.session.request(subject, dict(data), timeout_s=timeout_s, headers=headers)

    def listed(
        self, resource: str, query: Mapping[str, Any] | None = None, action: str = "list"
    ) -> dict[str, Any]:
        """Return an API list with the items of all pages, and the first page's other fields.

        Raises as `call`.
        """
        whole = page = self.call(resource, action, query or {})
        items = list(page.get("items") or ())
        while more := page.get("continue"):
            page = self.call(resource, action, {**(query or {}), "continue": more})
            items += page.get("items") or ()
        return {**whole, "items": items}

    def show(self, value: Any, table: Callable[[], str]) -> None:
        output.write(table() if self.for_eyes else output.render(value, self.style))

    def call_and_show(
        self,
        resource: str,
        verb: str,
        data: Mapping[str, Any],
        table: Callable[[Sequence[Mapping[str, Any]]], str],
    ) -> dict[str, Any]:
        """Send a request about one object; show and return its answer. Raises as `call`."""
        view = self.call(resource, verb, data)
        self.show(view, lambda: table([view]))
        return view

    def note(self, text: str) -> None:
        if self.for_eyes:
            output.write(text, sys.stderr)

    def close(self) -> None:
        if self._session is not None:
            self._session.close()


def verb(function: Callable[..., None]) -> Callable[..., None]:
    """Decorate a verb: add the options -o, --server and --creds, and pass an Invocation."""

    @functools.wraps(function)
    def run(*args: Any, style: str, server: str | None, creds: str | None, **kwargs: Any) -> None:
        above = click.get_current_context().find_root().params
        invocation = Invocation(style, server or above.get("server"), creds or above.get("creds"))
        try:
            function(invocation, *args, **kwargs)
        finally:
            invocation.close()

    for option in (_CREDS, _SERVER, _STYLE):
        run = option(run)
    return run


def local(function: Callable[..., None]) -> Callable[..., None]:
    """Decorate a verb without a connection: add the option -o, and pass an Invocation."""

    @functools.wraps(function)
    def run(*args: Any, style: str, **kwargs: Any) -> None:
        function(Invocation(style, None, None), *args, **kwargs)

    return _STYLE(run)


_STYLE = click.option(
    "-o",
    "--output",
    "style",
    type=click.Choice(STYLES),
    default="table",
    show_default=True,
    help="How to print the result.",
)
_SERVER = click.option(
    "--server",
    metavar="URL",
    help="NATS URL, such as nats://127.0.0.1:4222. [env: VIRTBUS_SERVER]",
)
_CREDS = click.option(
    "--creds",
    metavar="FILE",
    help="Credentials file. [env: VIRTBUS_CREDS; default: the file of `virtbus up`]",
)
