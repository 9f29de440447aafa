"""If certificates are required, reviews are answered only to API servers."""

import asyncio
import json
import ssl
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from services.kubebridge.tests.test_webhooks import review
from tests.kubernetes.certificates import Authority, Pair

from virtbus.kubebridge.edge.admission import MUTATE, routes
from virtbus.kubebridge.edge.web.authorization import Authorization
from virtbus.kubebridge.edge.web.tls import TlsListener, serving


class Told:
    """A cluster with the CA and the name of its front proxy's certificate."""

    def __init__(self, ca: str) -> None:
        self._data = {
            "requestheader-client-ca-file": ca,
            "requestheader-allowed-names": json.dumps(["front-proxy"]),
        }

    async def get(self, *_of: object) -> dict[str, Any]:
        return {"data": self._data}


async def test_only_the_front_proxy_gets_an_answer_if_certificates_are_required(
    tmp_path: Path,
) -> None:
    authority, door, app = Authority(tmp_path, "ca"), TlsListener(), web.Application()
    door.show(*authority.sign("bridge", "bridge", hosts=["localhost"]))
    cluster: Any = Told(authority.certificate.read_text())
    asking = Authorization(cluster, door)
    assert await asking.look()
    app.add_routes(routes(asking.is_front_proxy))
    server, other = (authority.sign(name, name) for name in ("front-proxy", "somebody"))

    async with asyncio.timeout(20), serving(app, "127.0.0.1", 0, door) as (_, port):

        async def ask(showing: Pair | None) -> int:
            context = ssl.create_default_context(cafile=str(authority.certificate))
            if showing is not None:
                context.load_cert_chain(*showing)
            async with (
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session,
                session.post(f"https://localhost:{port}{MUTATE}", data=review()) as answer,
            ):
                return answer.status

        assert [await ask(one) for one in (server, other, None)] == [200, 401, 401]
