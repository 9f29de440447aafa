"""Login to a cluster. No other module imports kubernetes_asyncio (ADR 0024)."""

import asyncio
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from virtbus.kubebridge.edge.import_shim import lean_import
from virtbus.schemas.errors import Code, VirtbusError

with lean_import():
    from kubernetes_asyncio.client.api_client import ApiClient
    from kubernetes_asyncio.client.configuration import Configuration
    from kubernetes_asyncio.config import ConfigException, load_incluster_config, load_kube_config

__all__ = ["ApiClient", "client"]

READ_BYTES = 2 * 1024 * 1024
"""Bytes of a response that are buffered unread. If the buffer is full, the server waits."""


@asynccontextmanager
async def client(kubeconfig: Path | None, agent: str) -> AsyncIterator[ApiClient]:
    """Yield a client of the cluster of a kubeconfig, or of the cluster of this pod.

    The client renews logins before they expire. `agent` is its User-Agent header.

    Raises:
        VirtbusError: 400 `no_login`: there is no valid login. The message names the attempted
        login.
    """
    configuration = Configuration()
    try:
        if kubeconfig is None:
            load_incluster_config(configuration)  # type: ignore[no-untyped-call]
        else:
            await load_kube_config(
                config_file=str(kubeconfig),
                client_configuration=configuration,
                persist_config=False,
            )
    except (ConfigException, OSError, AttributeError) as error:
        source = f"kubeconfig {kubeconfig}" if kubeconfig else "not in a pod (give --kubeconfig)"
        message = f"no login to a cluster: {source}: {error}"
        raise VirtbusError(Code.INVALID, "no_login", message) from error
    if configuration.proxy is None:
        configuration.proxy = _proxy(configuration.host or "")
    made = ApiClient(configuration)
    made.user_agent = agent
    _ask_for_no_proxy(made)
    try:
        yield made
    finally:
        await made.close()
        await asyncio.sleep(0)  # aiohttp closes its transports in the loop's next turn


def _proxy(url: str) -> str | None:
    parts = urlsplit(url)
    if urllib.request.proxy_bypass(parts.hostname or ""):
        return None
    return urllib.request.getproxies().get(parts.scheme)


def _ask_for_no_proxy(client: ApiClient) -> None:
    """Replace the session: no lookup of the proxy in a thread at each request, and READ_BYTES."""
    rest = client.rest_client
    connector = rest.pool_manager.connector
    rest.pool_manager.detach()
    rest.pool_manager = aiohttp.ClientSession(
        connector=connector, trust_env=False, read_bufsize=READ_BYTES
    )
