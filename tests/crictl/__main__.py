"""`make crictl CRICTL=path`: runs the commands of crictl on a node with both runtimes.

The program is built elsewhere (ADR 0024). It talks to the proxy, as the administrator of a node.
Each command and its answer are in `crictl.log`. It fails if an answer lacks what it must show.
"""

import argparse
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.e2e.platform import Platform
from tests.kubernetes.cluster import programs
from tests.kubernetes.container_host import BOX, ContainerHost

VM_IMAGE = "virtlet.cloud/tiny"
BOOT_S = 300.0
"""Time of a boot on a busy machine without KVM."""
CALL_S = "120s"
ABSENT = "Unimplemented"
"""The status of calls that Debian's containerd does not have, so that the node has none of them."""
FORWARDED = 10022


class Crictl:
    """The program on a socket, and a record of what it said."""

    def __init__(self, program: Path, socket: Path, log: Path, wrong: list[str]) -> None:
        """`wrong` gets a line for each answer that lacks what it must show."""
        where = f"unix://{socket}"
        self._argv = [str(program.resolve()), "--config", "/dev/null", "-r", where, "-i", where]
        self._argv += ["--timeout", CALL_S]
        self._log = log
        self.wrong = wrong

    def __call__(self, *words: str, shows: str = "", lacks: str = "", exit_code: int = 0) -> str:
        """Run a command; `shows` and `lacks` are regular expressions of its output."""
        done = subprocess.run(
            [*self._argv, *words], capture_output=True, text=True, timeout=BOOT_S, check=False
        )
        told = done.stdout + done.stderr
        with self._log.open("a") as log:
            log.write(f"$ crictl {' '.join(words)}\n{told}(exit {done.returncode})\n\n")
        for fault, found in (
            (f"exits with {done.returncode}: {told[-300:]}", done.returncode != exit_code),
            (f"does not show {shows!r}", not re.search(shows, told, re.MULTILINE)),
            (f"shows {lacks!r}", bool(lacks and re.search(lacks, told))),
        ):
            if found:
                self.wrong.append(f"crictl {words[0]}: {fault}")
        return done.stdout.strip()

    def refused(self, *words: str, shows: str) -> None:
        """Run a command that must fail with a text."""
        self(*words, shows=shows, exit_code=1)

    @contextmanager
    def following(self, path: Path, *words: str, shows: Sequence[str]) -> Iterator[None]:
        """Run a command that does not end by itself; its output is in a file."""
        with path.open("wb") as out, subprocess.Popen([*self._argv, *words], stdout=out) as process:
            try:
                yield
            finally:
                process.terminate()
        told = path.read_text()
        with self._log.open("a") as log:
            log.write(f"$ crictl {' '.join(words)}\n{told}\n")
        self.wrong += [
            f"crictl {words[0]}: does not show {one}" for one in shows if one not in told
        ]


def main() -> int:
    """Run the commands, and print what was wrong."""
    parser = argparse.ArgumentParser(prog="make crictl", description=__doc__)
    parser.add_argument("crictl", type=Path, help="the program")
    parser.add_argument("--log", type=Path, default=Path("build-out"), help="folder of the output")
    asked = parser.parse_args()
    asked.log.mkdir(exist_ok=True)
    log = asked.log / "crictl.log"
    log.unlink(missing_ok=True)
    folder = programs()
    if folder is None:
        print("not built; run: make k8s-tools", file=sys.stderr)
        return 5
    platform = Platform()
    try:
        platform.start()
        node = ContainerHost(
            platform, folder / "kubelet", folder / "debian", None, Path("/dev/null")
        )
        wrong: list[str] = []
        with node.runtimes():
            crictl = Crictl(asked.crictl, node.socket, log, wrong)
            alone = Crictl(asked.crictl, platform.run_dir / "cri.sock", log, wrong)
            _commands(crictl, alone, node)
    finally:
        platform.wipe()
    print("\n".join(wrong) or f"crictl: each command shows what it must; see {log}")
    return 1 if wrong else 0


def _commands(crictl: Crictl, alone: Crictl, node: ContainerHost) -> None:
    """Run all commands through the proxy; those that this containerd lacks on `alone`, too."""
    crictl("version", shows="RuntimeName: +containerd")
    alone("version", shows="RuntimeName: +virtbus")
    crictl("info", shows="virtbus.io/BusConnected")
    crictl.refused("runtime-config", shows=ABSENT)
    alone("runtime-config", shows="(?i)cgroupfs")
    crictl("pull", VM_IMAGE, shows="Image is up to date")
    crictl("images", shows=rf"{VM_IMAGE} +latest")
    crictl("images", shows=BOX.partition(":")[0])
    crictl("inspecti", VM_IMAGE, shows="sha256:")
    crictl("imagefsinfo", shows="usedBytes")
    crictl.refused("events", shows=ABSENT)
    kinds = ("CREATED", "STARTED", "STOPPED", "DELETED")
    with alone.following(node.base / "events", "events", shows=kinds):
        vm_pod, vm = _run(crictl, node, "web", VM_IMAGE, "--runtime=virtbus")
        box_pod, box = _run(crictl, node, "box", BOX)
        _look(crictl, vm_pod, vm, box_pod, box)
        crictl.refused("metricdescs", shows=ABSENT)
        alone("metricdescs", shows="container_cpu_usage_seconds_total")
        crictl.refused("metricsp", shows=ABSENT)
        alone("metricsp", shows=vm_pod)
        _use(crictl, vm)
        _forward(crictl, node, vm_pod)
        for pod, container in ((vm_pod, vm), (box_pod, box)):
            crictl("stop", "--timeout", "30", container, shows=container)
            crictl("ps", "-a", shows=f"{container[:13]}.*Exited")
            crictl("rm", container, shows=container)
            crictl("stopp", pod, shows="Stopped sandbox")
            crictl("pods", "--state", "NotReady", shows=pod[:13])
            crictl("rmp", pod, shows="Removed sandbox")
    crictl("pods", lacks="default")
    crictl("ps", "-a", lacks="default")
    crictl("rmi", VM_IMAGE, shows=f"Deleted: {VM_IMAGE}")
    crictl("images", lacks=VM_IMAGE)


def _run(crictl: Crictl, node: ContainerHost, name: str, image: str, *more: str) -> tuple[str, str]:
    """Run a pod of one container; return the ids of both."""
    folder = node.base / "logs" / name
    folder.mkdir()
    labels = {"io.kubernetes.pod.name": name, "io.kubernetes.pod.namespace": "default"}
    pod: dict[str, Any] = {
        "labels": labels,
        "metadata": {"name": name, "uid": f"{name}-uid", "namespace": "default", "attempt": 0},
        "log_directory": str(folder),
        "linux": {"cgroup_parent": "/virtbus-crictl"},
    }
    if image == BOX:
        pod["linux"] |= {"security_context": {"namespace_options": {"network": 2}}}
    container = {
        "labels": labels,
        "metadata": {"name": name},
        "image": {"image": image},
        "log_path": f"{name}.log",
        "linux": {"resources": {"memory_limit_in_bytes": 128 * 1024**2}},
        **({"args": ["while true; do echo box; sleep 1; done"]} if image == BOX else {}),
    }
    files = []
    for kind, config in (("pod", pod), ("container", container)):
        files.append(node.base / f"{name}-{kind}.json")
        files[-1].write_text(json.dumps(config))
    pod_id = crictl("runp", *more, str(files[0]))
    container_id = crictl("create", pod_id, str(files[1]), str(files[0]))
    crictl("ps", "-a", shows=f"{container_id[:13]}.*Created")
    crictl("start", container_id, shows=container_id)
    return pod_id, container_id


def _look(crictl: Crictl, vm_pod: str, vm: str, box_pod: str, box: str) -> None:
    crictl("pods", shows=f"(?s){vm_pod[:13]}.*Ready.*web.*default.*0 +virtbus")
    crictl("pods", shows=box_pod[:13])
    crictl("ps", shows=f"{vm[:13]} .*{VM_IMAGE}.*Running +web +0 +{vm_pod[:13]} +web")
    crictl("ps", shows=f"{box[:13]} .*Running")
    crictl("inspect", vm, shows='"state": "CONTAINER_RUNNING"')
    crictl("inspect", vm, shows='"logPath": "/.*/web.log"')
    crictl("inspectp", vm_pod, shows=r'"ip": "\d+\.\d+\.\d+\.\d+"')
    crictl("inspectp", vm_pod, shows='"state": "SANDBOX_READY"')
    deadline = time.monotonic() + BOOT_S
    while "GUEST-READY" not in crictl("logs", vm) and time.monotonic() < deadline:
        time.sleep(2)
    crictl("logs", "--tail", "100", vm, shows="^GUEST-READY")
    crictl("stats", shows=f"{vm[:13]}.*web.*MB")
    crictl("stats", shows=f"{box[:13]}.*box")
    crictl("stats", "-o", "json", vm, shows='"workingSetBytes"')
    crictl("statsp", shows=f"web +{vm_pod[:13]} .*MB")
    crictl("statsp", shows=box_pod[:13])


def _use(crictl: Crictl, vm: str) -> None:
    crictl("exec", "-s", vm, "sh", "-c", "echo $((6*7))", shows="^42$")
    crictl("exec", "-s", vm, "sh", "-c", "exit 3", shows="exit", exit_code=1)
    crictl("exec", vm, "sh", "-c", "echo $((6*7))", shows="^42$")
    crictl("exec", vm, "sh", "-c", "exit 3", shows="3", exit_code=1)
    crictl("logs", "--reopen", vm)
    crictl("update", "--cpu-share", "512", vm, shows=vm)
    crictl.refused("checkpoint", "--export", "/nowhere/x", vm, shows="Unimplemented.*CRIU")
    crictl.refused("inspect", "f" * 64, shows="(?i)not ?found")
    crictl.refused("exec", "-s", "f" * 64, "true", shows="(?i)not ?found")


def _forward(crictl: Crictl, node: ContainerHost, pod: str) -> None:
    """Read what the guest's SSH server says, through a port of this host."""
    words = ("port-forward", pod, f"{FORWARDED}:22")
    with crictl.following(node.base / "forward", *words, shows=[str(FORWARDED)]):
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with (
                suppress(OSError),
                socket.create_connection(("127.0.0.1", FORWARDED), timeout=30) as client,
            ):
                if client.recv(8).startswith(b"SSH-"):
                    return
            time.sleep(0.5)
        crictl.wrong.append("crictl port-forward: the guest's SSH server does not answer")


if __name__ == "__main__":
    sys.exit(main())
