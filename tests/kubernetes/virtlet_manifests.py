"""Virtlet's example manifests, with texts of ours, or as they are in a folder of Virtlet's source.

VIRTBUS_VIRTLET_EXAMPLES names such a folder. Its files are applied unchanged.
"""

import json
import os
from pathlib import Path
from typing import Any

import yaml
from services.cri.tests.virtlet_examples import (
    DEVICE,
    EXAMPLES,
    FOLDER,
    QCOW2,
    ROOT,
    UNMOUNTED,
    annotations,
)

Json = dict[str, Any]
GIVEN = os.environ.get("VIRTBUS_VIRTLET_EXAMPLES", "")
IMAGES = {
    "cirros": "cirros",
    "debian": "cdimage.debian.org/debian-openstack-amd64.qcow2",
    "fedora": "fedora",
    "ubuntu": "cloud-images.ubuntu.com/xenial-server-cloudimg-amd64-disk1.img",
    "k8s": "cloud-images.ubuntu.com/xenial-server-cloudimg-amd64-disk1.img",
}
"""The image of an example by the first word of its name."""
NODE = "kube-node-1"
"""The hostname of the node in manifests with a local volume."""
LABELS = {"extraRuntime": "virtlet", "kubernetes.io/hostname": NODE}
"""Labels of the node that manifests select."""
MIB = 1024**2
HOSTPATH = Path("/var/lib/virtlet/hostpath")
"""The folder of the node in a manifest."""
DOCKER = "/var/lib/docker"
"""The mount point of an example's disk."""


class Paths:
    """Paths of the node that manifests name. Those of Virtlet's own files are fixed."""

    def __init__(self, base: Path) -> None:
        self.rootdev = Path("/dev/rootdev") if GIVEN else base / "rootdev"
        self.data = Path("/var/lib/virtlet/looptest") if GIVEN else base / "looptest"
        self.folder = HOSTPATH if GIVEN else base / "shared/hostpath"


def manifest(name: str, key: str, paths: Paths) -> list[Json]:
    """Return the objects of an example; `key` is a public key for those of ours."""
    if GIVEN:
        return list(yaml.safe_load_all(Path(GIVEN, f"{name}.yaml").read_text()))
    example = EXAMPLES[name]
    volume, more = _volume(example.volume, paths)
    container = {
        "name": "vm",
        "image": f"virtlet.cloud/{IMAGES[name.partition('-')[0]]}",
        "imagePullPolicy": "IfNotPresent",
        "tty": True,
        "stdin": True,
        **(
            {"resources": {"limits": {"memory": f"{example.memory_mib}Mi"}}}
            if example.memory_mib
            else {}
        ),
        **_used(example.volume),
    }
    spec = {
        "nodeSelector": {"extraRuntime": "virtlet"},
        "terminationGracePeriodSeconds": 120,
        "containers": [container],
        "volumes": volume,
    }
    meta = {"name": name, "labels": {"app": name}, "annotations": annotations(example, key)}
    return [*more, _workload(name, {"metadata": meta, "spec": spec})]


def _workload(name: str, pod: Json) -> Json:
    if name not in {"cirros-vm-deployment", "k8s"}:
        return {"apiVersion": "v1", "kind": "Pod", **pod}
    kind, more = ("StatefulSet", {"serviceName": name}) if name == "k8s" else ("Deployment", {})
    selector = {"matchLabels": pod["metadata"]["labels"]}
    spec = {"replicas": 1, "selector": selector, "template": pod, **more}
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def _used(kind: str) -> Json:
    """Return the part of a container that uses its volume."""
    if kind in {ROOT, DEVICE}:
        path = "/" if kind == ROOT else "/dev/testpvc"
        return {"volumeDevices": [{"name": "data", "devicePath": path}]}
    if kind in {QCOW2, FOLDER}:
        path = DOCKER if kind == QCOW2 else "/home/data"
        return {"volumeMounts": [{"name": "data", "mountPath": path}]}
    return {}


def _volume(kind: str, paths: Paths) -> tuple[list[Json], list[Json]]:
    """Return the volumes of a pod, and the objects of the cluster that they need."""
    flex: Json = {"driver": "virtlet/flexvolume_driver"}
    if kind == QCOW2:
        return [
            {
                "name": "data",
                "flexVolume": {**flex, "options": {"type": "qcow2", "capacity": "40MB"}},
            }
        ], []
    if kind == UNMOUNTED:
        options = {"type": "raw", "path": "/dev/loop0"}
        return [{"name": "data", "flexVolume": {**flex, "options": options}}], []
    if kind not in {ROOT, DEVICE, FOLDER}:
        return [], []
    claim = {"name": "data", "persistentVolumeClaim": {"claimName": "claim"}}
    mode = "Filesystem" if kind == FOLDER else "Block"
    same = {
        "accessModes": ["ReadWriteOnce"],
        "volumeMode": mode,
        "storageClassName": "local-storage",
    }
    where: Json = {"local": {"path": str(paths.rootdev if kind == ROOT else paths.data)}}
    matching = {"key": "kubernetes.io/hostname", "operator": "In", "values": [NODE]}
    where["nodeAffinity"] = {"required": {"nodeSelectorTerms": [{"matchExpressions": [matching]}]}}
    if kind == FOLDER:
        where = {"hostPath": {"path": str(paths.folder)}}
    requested = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "claim"},
        "spec": {**same, "resources": {"requests": {"storage": "100Mi"}}},
    }
    bound = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": "volume"},
        "spec": {
            **same,
            **where,
            "capacity": {"storage": "100Mi"},
            "persistentVolumeReclaimPolicy": "Retain",
            "claimRef": {"name": "claim", "namespace": "default"},
        },
    }
    return [claim], [requested, bound]


def as_list(objects: list[Json]) -> str:
    """Return objects as one document for kubectl."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
