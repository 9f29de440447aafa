"""Authentication of users by the front proxy, and authorization by a SubjectAccessReview."""

import asyncio
import logging

from aiohttp import web

from virtbus.bus.runtime.recent import Recent
from virtbus.kubebridge.core.api.access import SubresourceTarget, forbidden, review
from virtbus.kubebridge.core.api.front_proxy import NAME, NAMESPACE, FrontProxy, User, of_config_map
from virtbus.kubebridge.core.objects.status_errors import of_http
from virtbus.kubebridge.core.objects.unstructured import at, text
from virtbus.kubebridge.core.runtime.controller import ACCESS_REVIEW, CONFIG_MAP
from virtbus.kubebridge.edge.cluster import KubernetesApi, StatusError
from virtbus.kubebridge.edge.web.error_middleware import RefusedError
from virtbus.kubebridge.edge.web.tls import TlsListener

log = logging.getLogger(__name__)

LOOK_S = 60.0
"""Seconds between reads of the front proxy's ConfigMap. Its CA changes once in years."""
AGAIN_S = 2.0
"""Seconds before a retry if the ConfigMap could not be read, or has no CA."""
ALLOWED_S = 5.0
"""Seconds for which a permission is cached. A refusal is never cached."""
ALLOWED_MAX = 1024


class Authorization:
    """Authenticates and authorizes the users of the aggregated API."""

    def __init__(self, cluster: KubernetesApi, door: TlsListener) -> None:
        self._cluster = cluster
        self._door = door
        self._proxy = FrontProxy()
        self._allowed: Recent[tuple[User, str, SubresourceTarget], float] = Recent(ALLOWED_MAX)

    async def follow(self) -> None:
        while True:
            found = await self.look()
            await asyncio.sleep(LOOK_S if found else AGAIN_S)

    async def look(self) -> bool:
        """Read the configuration now. If the read fails, the old configuration stays.

        Return False if the read failed, or if the configuration has no CA.
        """
        try:
            found = of_config_map(await self._cluster.get(CONFIG_MAP, NAME, NAMESPACE))
            if found.ca != self._proxy.ca:
                self._door.trust(found.ca)
        except (StatusError, OSError) as error:  # includes ssl's errors
            log.warning(
                "cannot read %s/%s: %s", NAMESPACE, NAME, error, extra={"code": "front_proxy"}
            )
            return False
        self._proxy = found
        return bool(found.ca)

    def user(self, request: web.Request) -> User:
        """Return the user of a request.

        Raises:
            RefusedError: 401, the request names no user, or the client is not the front proxy.
        """
        user = self._proxy.user(list(request.headers.items()))
        if user is None or not self.is_front_proxy(request):
            raise RefusedError(of_http(401, "Unauthorized"))
        return user

    def is_front_proxy(self, request: web.Request) -> bool:
        return self._proxy.is_it(request.get_extra_info("peercert"))

    async def may(self, user: User, method: str, target: SubresourceTarget) -> None:
        """Check that the user may send the request.

        Raises:
            RefusedError: 403, the user has no permission.
            StatusError: the API server could not decide.
        """
        asked, now = (user, method, target._replace(rest=())), asyncio.get_running_loop().time()
        if self._allowed.get(asked, now) > now:
            return
        answer = await self._cluster.create(ACCESS_REVIEW, review(user, method, target))
        if at(answer, "status", "allowed") is not True:
            raise RefusedError(forbidden(user, method, target, text(answer, "status", "reason")))
        self._allowed[asked] = now + ALLOWED_S
