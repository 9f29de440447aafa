"""Executes docs/howto/kubernetes.md line by line: each command works as printed."""

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.kubernetes.cluster import ROOT, Cluster
from tests.kubernetes.installed import account, applied
from tests.kubernetes.platform import Platform, run
from tests.load.servers import free_ports

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(300)]

PAGE = ROOT / "docs" / "howto" / "kubernetes.md"
BLOCK = re.compile(r"^```(sh|yaml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
REFUSED = "# is refused"


def blocks() -> list[tuple[str, str]]:
    """Return the page's blocks: their language and text, in order."""
    return BLOCK.findall(PAGE.read_text())


@pytest.fixture
def folder(kubevirt: Cluster, tmp_path: Path) -> Path:
    """The reader's folder: the repository's files, the login, the manifest, and a kubectl."""
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    (tmp_path / "first.yaml").write_text(next(text for kind, text in blocks() if kind == "yaml"))
    (tmp_path / "bin").mkdir()
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.write_text(
        f'#!/bin/sh\nexec {kubevirt.program} --kubeconfig={kubevirt.kubeconfig} "$@"\n'
    )
    kubectl.chmod(0o755)
    return tmp_path


@pytest.fixture
def platform(kubevirt: Cluster) -> Iterator[Platform]:
    """virtbus next to the cluster; the page starts the bridge itself."""
    (at,) = free_ports(1)
    made = Platform(kubevirt, account(kubevirt), at)
    with made.running(bridge=False):
        yield made
        made.bridge.stop()  # again: a failed test left it running


def test_the_commands_of_the_page_work(platform: Platform, folder: Path) -> None:
    """Two lines are replaced: this cluster has no network of pods, and no node for them."""
    (folder / "bridge.creds").write_bytes((platform.folder / "run" / "bridge.creds").read_bytes())

    def begin() -> None:
        platform.bridge.start()
        run(platform.bridge.ready())

    otherwise: dict[str, Callable[[], object]] = {
        "kubectl apply -f deploy/kubernetes/manifests": lambda: applied(
            platform.cluster, platform.at
        ),
        "kubectl -n kubevirt rollout status deployment/virtbus-kubebridge": begin,
    }
    lines = [line for kind, text in blocks() if kind == "sh" for line in text.splitlines()]
    assert set(otherwise) <= set(lines)
    *lines, last = lines
    for line in lines:
        if instead := otherwise.get(line):
            instead()
            continue
        done = followed(line, folder)
        assert (done.returncode == 0) != (REFUSED in line), f"{line}\n{done.stdout}{done.stderr}"
    assert platform.vms("default") == {}
    assert platform.missing_rights() == []
    platform.bridge.stop()  # as its pods end
    assert followed(last, folder).returncode == 0


def followed(line: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run a line in a shell; the API server may need a moment for freshly applied objects."""
    until_s = time.monotonic() + 30
    while True:
        done = subprocess.run(
            ["/bin/sh", "-c", line],
            cwd=folder,
            env={"PATH": f"{folder}/bin:/usr/bin:/bin", "HOME": str(folder)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0 or REFUSED in line or time.monotonic() > until_s:
            return done
        time.sleep(0.2)
