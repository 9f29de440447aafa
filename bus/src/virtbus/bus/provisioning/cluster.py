"""Configures a server as a member of a cluster, and checks the kind of the server's store."""

from dataclasses import dataclass
from pathlib import Path

from virtbus.bus.errors import BusError

ROUTE_USER = "route"
"""The user for logins between servers. Its password is in the servers' shared passwords file."""
_BLOCK = """\
cluster {{
  name: "virtbus"
  listen: "{listen}"
  no_advertise: true
  authorization {{ user: "{user}", password: "{password}", timeout: 3 }}
  routes: [{routes}]
}}"""


@dataclass(frozen=True, slots=True)
class ClusterMember:
    """A member of a cluster. All members share one passwords file and the port for clients."""

    listen: str
    """`host:port` on which this server accepts the other servers."""
    routes: tuple[str, ...]
    """`host:port` of each member; may include this server."""

    @property
    def others(self) -> list[str]:
        return [route for route in self.routes if route != self.listen]

    @property
    def label(self) -> str:
        """Return a label for the server's name, unique in the cluster and permanent."""
        return self.listen.replace(":", "-")

    def peers(self, port: int) -> list[str]:
        return [f"nats://{route.rpartition(':')[0]}:{port}" for route in self.others]

    def block(self, password: str) -> str:
        routes = (f'"nats://{ROUTE_USER}:{password}@{route}"' for route in self.others)
        return _BLOCK.format(
            listen=self.listen, user=ROUTE_USER, password=password, routes=", ".join(routes)
        )


def keep_kind(store: Path, cluster: ClusterMember | None) -> None:
    """Mark the store as the store of a single server or of a cluster.

    In a store of the other kind, nats-server would treat the streams as orphans.

    Raises:
        BusError: the store has the other kind.
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
