"""Certificates of the bridge, in a Secret for all replicas, and the publication of their CA.

Missing certificates are made, and expiring certificates are renewed. Instead, cert-manager or
another tool can maintain `tls.crt` and `tls.key` in the folder `own`. The bridge then only serves
these files.
"""

import base64
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from virtbus.bus.runtime.sources import REAL, Sources
from virtbus.kubebridge.core.objects.unstructured import Object, items, part, text
from virtbus.kubebridge.core.runtime.controller import (
    API_SERVICE,
    MUTATING,
    SECRET,
    VALIDATING,
    Key,
    Kind,
)
from virtbus.kubebridge.edge.cluster import KubernetesApi, StatusError
from virtbus.kubebridge.edge.runtime.workqueue import Lane
from virtbus.kubebridge.edge.signing import KeyMaterial, renewed
from virtbus.kubebridge.edge.web.tls import in_memory

SECRET_NAME = "virtbus-kubebridge-certificates"  # noqa: S105  the name of a Secret
SERVICE_NAME = "virtbus-kubebridge"
WEBHOOKS = "virtbus-kubebridge"
LOOK_S = 60.0
"""Seconds between checks. A check also finds changes by another replica or by cert-manager."""
RETRY_S = 5.0
API_SERVICES = ("v1.subresources.kubevirt.io", "v1alpha3.subresources.kubevirt.io")
_FILES = {"ca.crt": "ca_crt", "ca.key": "ca_key", "tls.crt": "tls_crt", "tls.key": "tls_key"}
_log = logging.getLogger(__name__)

Show = Callable[[Path, Path], None]
"""Serves a certificate (with its chain) and its key from now on. Raises ValueError or OSError."""


class Certificates:
    """Keeps the bridge's serving certificate valid and trusted, and passes it to `show`.

    `namespace` is the namespace of the bridge. `own` is the folder of certificates that another
    tool maintains.
    """

    def __init__(
        self,
        cluster: KubernetesApi,
        namespace: str,
        show: Show,
        own: Path | None = None,
        sources: Sources = REAL,
    ) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._names = tuple(f"{SERVICE_NAME}.{namespace}{end}" for end in (".svc", ""))
        """The host names by which API servers call the bridge's Service."""
        self._show = show
        self._own = own
        self._sources = sources
        self._shown: tuple[bytes, bytes] | None = None

    @property
    def key(self) -> Key:
        return Key(SECRET, self._namespace, SECRET_NAME)

    def lane(self) -> Lane:
        """Return the lane of the work queue for the checks. All replicas serve, so all check."""
        return Lane(self.reconcile, workers=1, always=True)

    async def reconcile(self, _: Key) -> float:
        try:
            await self.ensure()
        except (StatusError, OSError, ValueError) as error:
            forbidden = isinstance(error, StatusError) and error.code == 403
            mend = "; apply deploy/kubernetes again, its roles changed" if forbidden else ""
            _log.warning("certificates: %s%s", error, mend, extra={"code": "certificates"})
            return RETRY_S
        return LOOK_S

    async def ensure(self) -> None:
        if self._own is not None:
            self._serve(self._own / "tls.crt", self._own / "tls.key")
            return
        kept = await self._kept()
        # The files are in memory: the key must not be on a disk, and a pod's root may be read-only.
        with in_memory(kept.tls_crt.encode()) as crt, in_memory(kept.tls_key.encode()) as key:
            self._serve(crt, key)
        bundle = base64.b64encode(kept.ca_crt.encode()).decode()
        for name in API_SERVICES:
            service = await self._cluster.get(API_SERVICE, name)
            if service is not None and text(service, "spec", "caBundle") != bundle:
                await self._cluster.patch(API_SERVICE, name, {"spec": {"caBundle": bundle}})
        for kind in (MUTATING, VALIDATING):
            await self._trust_in_webhooks(kind, bundle)

    # --- the Secret -----------------------------------------------------------------------
    async def _kept(self) -> KeyMaterial:
        """Return the certificates in the Secret, renewed if necessary.

        If several replicas renew at once, the first writes and the others read the result.
        """
        while True:
            secret = await self._cluster.get(SECRET, SECRET_NAME, self._namespace)
            kept = _read(secret)
            now = self._sources.now().replace(microsecond=0)  # certificates have whole seconds
            fresh = renewed(kept, self._names, now)
            if fresh == kept:
                return kept
            try:
                await self._write(secret, fresh)
            except StatusError as answer:
                if answer.code != 409:
                    raise
                _log.info("another replica made the certificates")
            else:
                _log.info("certificates renewed", extra={"code": "certificates"})

    async def _write(self, secret: dict[str, Any] | None, kept: KeyMaterial) -> None:
        data = {
            name: base64.b64encode(getattr(kept, field).encode()).decode()
            for name, field in _FILES.items()
        }
        if secret is not None:
            await self._cluster.replace(SECRET, secret | {"data": data})
            return
        metadata = {"name": SECRET_NAME, "namespace": self._namespace}
        body = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data}
        await self._cluster.create(SECRET, body, self._namespace)

    # --- serving --------------------------------------------------------------------------
    def _serve(self, certificate: Path, key: Path) -> None:
        found = certificate.read_bytes(), key.read_bytes()
        if found != self._shown:
            self._show(certificate, key)
            self._shown = found

    async def _trust_in_webhooks(self, kind: Kind, bundle: str) -> None:
        """Set the CA of each webhook. The patch fails if the webhooks were reordered meanwhile."""
        configured = await self._cluster.get(kind, WEBHOOKS)
        steps: list[dict[str, Any]] = []
        for index, webhook in enumerate(items(configured, "webhooks")):
            if text(webhook, "clientConfig", "caBundle") != bundle:
                at = f"/webhooks/{index}"
                steps += [
                    {"op": "test", "path": f"{at}/name", "value": text(webhook, "name")},
                    {"op": "add", "path": f"{at}/clientConfig/caBundle", "value": bundle},
                ]
        if steps:
            await self._cluster.patch(kind, WEBHOOKS, steps, how="json")


def _read(secret: Object | None) -> KeyMaterial:
    """Parse the Secret. Unreadable parts count as missing and are made again."""
    found = {}
    for name, field in _FILES.items():
        try:
            found[field] = base64.b64decode(text(part(secret, "data"), name)).decode()
        except ValueError:
            found[field] = ""
    return KeyMaterial(**found)
