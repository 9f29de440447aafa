"""`make critest CRITEST=path`: runs the program against containerd, and then against virtbus.

The program is built elsewhere (ADR 0024). It fails if virtbus passes too few of the specs that
containerd passes and that have a meaning for a VM.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from services.imaged.tests.docker_registry import Debian
from tests.critest.images import images
from tests.critest.report import BOUND, Results, compared, excluded, results, summary
from tests.e2e.platform import Platform
from tests.kubernetes.cluster import programs
from tests.kubernetes.container_host import ContainerHost

REGISTRIES = ("registry.k8s.io", "k8s.gcr.io", "gcr.io")
RUN_S = 3600.0
NETWORK = {
    "cniVersion": "0.4.0",
    "name": "pods",
    "plugins": [
        {
            "type": "bridge",
            "bridge": "cri-pods",
            "isGateway": True,
            "ipMasq": True,
            "ipam": {
                "type": "host-local",
                "ranges": [[{"subnet": "10.98.0.0/24"}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        },
        {"type": "portmap", "capabilities": {"portMappings": True}},
        {"type": "loopback"},
    ],
}


class CritestHost(ContainerHost):
    """A node without kubelet, whose images come from the registry on loopback."""

    network = NETWORK

    def __init__(self, platform: Platform, folder: Path, server: str) -> None:
        self.mirrors = dict.fromkeys(REGISTRIES, server)
        super().__init__(platform, folder / "kubelet", folder / "debian", None, Path("/dev/null"))


def main() -> int:
    """Run both, and print the comparison."""
    parser = argparse.ArgumentParser(prog="make critest", description=__doc__)
    parser.add_argument("critest", type=Path, help="the program")
    parser.add_argument("--focus", default="", help="a regular expression of specs")
    parser.add_argument("--only", choices=("containers", "vms"), help="one runtime")
    parser.add_argument("--log", type=Path, default=Path("build-out"), help="folder of the output")
    asked = parser.parse_args()
    asked.log.mkdir(exist_ok=True)
    told = programs()
    if told is None:
        print("not built; run: make k8s-tools", file=sys.stderr)
        return 5
    with tempfile.TemporaryDirectory(prefix="virtbus-critest-") as name:
        folder = Path(name)
        registry = Debian(folder)
        with registry.running():
            asyncio.run(registry.push(images(folder)))
            return _on_node(asked, told, registry.host)


def _on_node(asked: argparse.Namespace, folder: Path, server: str) -> int:
    mirrors = json.dumps(dict.fromkeys(REGISTRIES, server))
    platform = Platform(
        {
            "VIRTBUS_REGISTRY_MIRRORS": mirrors,
            "VIRTBUS_INSECURE_REGISTRIES": json.dumps([server]),
            "VIRTBUS_IMAGE_ADDRESSES": json.dumps(["127.0.0.0/8"]),
        }
    )
    try:
        platform.start()
        node = CritestHost(platform, folder, server)
        with node.runtimes():
            found: dict[str, Results] = {}
            if asked.only != "vms":
                found["containers"] = _run(asked, node.containerd_socket, "containers", [])
            if asked.only != "containers":
                vms = platform.run_dir / "cri.sock"
                words = ["-runtime-handler=virtbus", *(f"-ginkgo.skip={one}" for one in _skips())]
                found["vms"] = _run(asked, vms, "vms", words)
    finally:
        platform.wipe()
    for runtime, told in found.items():
        print(summary(runtime, told))
    if len(found) < 2:
        return 0
    part, report = compared(found["containers"], found["vms"], excluded())
    print(report)
    return 0 if part >= BOUND else 1


def _skips() -> list[str]:
    """Return the excluded specs as regular expressions."""
    return ["".join(f"\\{one}" if one in "[].|()" else one for one in name) for name in excluded()]


def _run(asked: argparse.Namespace, socket: Path, runtime: str, words: list[str]) -> Results:
    """Run the program against a socket; its output is in `critest-RUNTIME.log`."""
    report = asked.log / f"critest-{runtime}"
    argv = [
        str(asked.critest.resolve()),
        f"-runtime-endpoint=unix://{socket}",
        f"-image-endpoint=unix://{socket}",
        f"-report-dir={report.resolve()}",
        "-ginkgo.no-color",
        f"-ginkgo.junit-report={(report / 'junit.xml').resolve()}",
        *([f"-ginkgo.focus={asked.focus}"] if asked.focus else []),
        *words,
    ]
    report.mkdir(exist_ok=True)
    with (asked.log / f"critest-{runtime}.log").open("wb") as log:
        subprocess.run(argv, stdout=log, stderr=log, timeout=RUN_S, check=False)
    return results(report / "junit.xml")


if __name__ == "__main__":
    sys.exit(main())
