"""`python -m tests.fuzz.webhooks`: the Kubernetes bridge's port without a Kubernetes behind it.

The routes are the bridge's own: both webhooks and the subresources. Every caller is a tenant
with every right to the verbs, and there is no object to act on: the target is the code that
reads requests.
"""

import asyncio
from typing import Any, cast

import uvloop
from aiohttp import web
from tests.fuzz.pool import BRIDGE_PORT

from virtbus.kubebridge.edge.admission import routes
from virtbus.kubebridge.edge.cluster import KubernetesApi
from virtbus.kubebridge.edge.web.authorization import Authorization
from virtbus.kubebridge.edge.web.error_middleware import in_status
from virtbus.kubebridge.edge.web.guest_proxy import Guests
from virtbus.kubebridge.edge.web.subresources import Subresources


class NoCluster:
    """Has no object."""

    async def get(self, *_: Any) -> None:
        return None


class Anybody:
    """Lets everybody do everything."""

    def user(self, _request: web.Request) -> Any:
        return None

    async def may(self, *_: Any) -> None:
        return None


async def main() -> None:
    app = web.Application(middlewares=[in_status])
    app.add_routes(routes())
    cluster, asking = cast("KubernetesApi", NoCluster()), cast("Authorization", Anybody())
    app.add_routes(Subresources(cluster, cast("Guests", None), asking).routes())
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", BRIDGE_PORT).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main())
