"""A server's place in a cluster of three: its part of the configuration, and its store's kind."""

from dataclasses import dataclass
from pathlib import Path

from virtbus.bus.ports import BusError

ROUTE_USER = "route"
"""How servers of one cluster know each other; its password is in the passwords file."""
_BLOCK = """\
cluster {{
  name: "virtbus"
  listen: "{listen}"
  no_advertise: true
  authorization {{ user: "{user}", password: "{password}", timeout: 3 }}
  routes: [{routes}]
}}"""


@dataclass(frozen=True, slots=True)
class Cluster:
    """All members share one passwords file, and clients' port is the same on each."""

    listen: str
    """`host:port` on which this server takes the others' connections."""
    routes: tuple[str, ...]
    """`host:port` of each member; this server's own may be among them."""

    @property
    def others(self) -> list[str]:
        """The routes to other servers."""
        return [route for route in self.routes if route != self.listen]

    @property
    def label(self) -> str:
        """Unique in the cluster and the same after each start: the store is known by it."""
        return self.listen.replace(":", "-")

    def peers(self, port: int) -> list[str]:
        """The other servers' URLs for clients."""
        return [f"nats://{route.rpartition(':')[0]}:{port}" for route in self.others]

    def block(self, password: str) -> str:
        """The server's `cluster {}`."""
        routes = (f'"nats://{ROUTE_USER}:{password}@{route}"' for route in self.others)
        return _BLOCK.format(
            listen=self.listen, user=ROUTE_USER, password=password, routes=", ".join(routes)
        )


def keep_kind(store: Path, cluster: Cluster | None) -> None:
    """Refuse a store of the other kind: nats-server would take its streams for orphans.

    Raises:
        BusError: the store is of a single server and a cluster was asked for, or the reverse.
    """
    mark, wanted = store / "kind", "cluster" if cluster is not None else "single"
    if (store / "jetstream").exists():
        found = mark.read_text(encoding="ascii").strip() if mark.exists() else "single"
        if found != wanted:
            msg = (
                f"{store} is the store of a {found} server, and this is to be a {wanted} one:"
                " back the bus up, start on another state directory, and restore it there"
            )
            raise BusError(msg)
    mark.write_text(f"{wanted}\n", encoding="ascii")
