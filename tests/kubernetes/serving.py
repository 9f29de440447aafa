"""The bridge's webhooks and certificates alone, in a thread, without a bus."""

import asyncio
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler

from virtbus.documents.manifests import NAMESPACE
from virtbus.kubebridge.edge.admission import routes
from virtbus.kubebridge.edge.certificates import Certificates
from virtbus.kubebridge.edge.cluster import connect


class Webhooks:
    """One replica. `asked` counts the calls by their path."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.asked: Counter[str] = Counter()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._shown, self._stop = asyncio.Event(), asyncio.Event()

    @contextmanager
    def serving(self, kubeconfig: Path) -> Iterator[None]:
        """Serve until the block ends, with the rights of a kubeconfig."""
        ready = threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(self._serve(kubeconfig, ready)))
        thread.start()
        try:
            assert ready.wait(60), "the webhooks do not serve"
            yield
        finally:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._stop.set)
            thread.join()

    async def _serve(self, kubeconfig: Path, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()

        @web.middleware
        async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
            self.asked[request.path] += 1
            return await handler(request)

        application = web.Application(middlewares=[count])
        application.add_routes(routes())
        runner = web.AppRunner(application)
        await runner.setup()
        async with connect(kubeconfig) as cluster, asyncio.TaskGroup() as group:
            keeper = Certificates(cluster, NAMESPACE, self._show)
            kept = group.create_task(_kept(keeper))
            await self._shown.wait()
            site = web.SockSite(runner, self.socket, ssl_context=self.context)
            await site.start()
            ready.set()
            await self._stop.wait()
            kept.cancel()
        await runner.cleanup()
        await asyncio.sleep(0.1)  # TLS closes its connections

    def _show(self, certificate: Path, key: Path) -> None:
        self.context.load_cert_chain(certificate, key)
        self._shown.set()


async def _kept(keeper: Certificates) -> None:
    """Keep the certificates valid until cancelled, as the bridge's work queue does."""
    while True:
        await asyncio.sleep(await keeper.reconcile(keeper.key))
