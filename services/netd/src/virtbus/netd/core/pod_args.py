"""Names of a VM's pod for CNI plugins, as container runtimes give them.

Plugins such as Calico's look the pod up at the API server. Only a VM that a node's runtime made
counts as a pod. Other clients could name a foreign pod.
"""

import re

from virtbus.bus.client.owners import node_of
from virtbus.schemas.pod import POD_NAME, POD_UID
from virtbus.schemas.vm import VmRecord

_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?")
_UID = re.compile(r"[A-Za-z0-9-]{1,64}")


def pod_args(record: VmRecord) -> dict[str, str]:
    """Return the words of CNI_ARGS for the pod of a VM; empty if the VM is not a pod.

    If the pod's name or uid has a character that Kubernetes forbids, such as `;`, the result is
    also empty. A `;` could add further words.
    """
    name, uid = (record.annotations.get(key, "") for key in (POD_NAME, POD_UID))
    if not (node_of(record.owner) and _NAME.fullmatch(name) and _UID.fullmatch(uid)):
        return {}
    return {
        "K8S_POD_NAMESPACE": record.namespace,
        "K8S_POD_NAME": name,
        "K8S_POD_INFRA_CONTAINER_ID": record.uid,
        "K8S_POD_UID": uid,
    }
