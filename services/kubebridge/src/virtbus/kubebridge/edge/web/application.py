"""Assembly of the application of the HTTPS port."""

from collections.abc import Callable, Iterable

from aiohttp import web

from virtbus.bus.client.ports import Bus
from virtbus.kubebridge.edge.cluster import KubernetesApi
from virtbus.kubebridge.edge.web.authorization import Authorization
from virtbus.kubebridge.edge.web.discovery import documents, health
from virtbus.kubebridge.edge.web.error_middleware import in_status
from virtbus.kubebridge.edge.web.guest_proxy import Guests
from virtbus.kubebridge.edge.web.subresources import Subresources
from virtbus.kubebridge.edge.web.tls import TlsListener, serving
from virtbus.schemas.version import VERSION


class Application:
    """The HTTPS port. It accepts connections once `door`, its TLS listener, has a certificate."""

    def __init__(self, bus: Bus, cluster: KubernetesApi, listen: str) -> None:
        self.door = TlsListener()
        self.where: tuple[str, int] | None = None
        """The address and port of the listener; None before it listens."""
        host, _, port = listen.rpartition(":")
        self._listen = (host.strip("[]"), int(port))
        self.asking = Authorization(cluster, self.door)
        self._verbs = Subresources(cluster, Guests(bus), self.asking)

    async def run(self, ready: Callable[[], str], webhooks: Iterable[web.RouteDef] = ()) -> None:
        """Serve until cancelled. `ready` returns the reason why the bridge is not ready, or ""."""
        app = web.Application(middlewares=[in_status])
        app.add_routes([*health(ready), *webhooks, *documents(self.asking, VERSION)])
        app.add_routes(self._verbs.routes())
        await self.asking.look()
        async with serving(app, *self._listen, self.door) as self.where:
            await self.asking.follow()
