"""`virtbus vm update` against scripted services on a real nats-server."""

import json
from pathlib import Path

import pytest
from cli.tests.fakes import UID, Cli, Script, vm_view

from virtbus.schemas.cpu import CpuFeature
from virtbus.schemas.vm import Cpu, Domain, VmSpec

pytestmark = pytest.mark.integration


async def test_flags_change_only_what_they_name(script: Script, cli: Cli) -> None:
    spec = VmSpec(domain=Domain(cpu=Cpu(sockets=2, model="host-model")), termination_grace_s=7)
    script.answer("vm", "get", vm_view(spec=spec))
    script.answer("vm", "update", vm_view(spec=spec))
    ended = await cli("vm", "update", "web", "--cpus", "4", "--memory", "1GiB", "--protected")
    assert ended.code == 0, ended.err
    sent = script.data("vm.update")[-1]
    assert (sent["uid"], sent["revision"]) == (UID, 7)
    after = VmSpec.model_validate(sent["spec"])
    assert (after.domain.cpu.vcpus, after.domain.cpu.model) == (4, "host-model")
    assert (after.domain.memory.guest, after.protected) == (2**30, True)
    assert after.termination_grace_s == 7
    assert "labels" not in sent
    assert (await cli("vm", "update", "web", "--label", "tier=front")).code == 0
    sent = script.data("vm.update")[-1]
    assert (sent["labels"], "spec" in sent) == ({"tier": "front"}, False)


@pytest.mark.parametrize(
    ("cpus", "sockets", "cores", "threads"),
    [("8", 2, 2, 2), ("4", 2, 1, 2), ("6", 1, 6, 1), ("1", 1, 1, 1)],
)
async def test_cpus_keep_the_model_its_features_and_a_topology_that_fits(
    script: Script, cli: Cli, cpus: str, sockets: int, cores: int, threads: int
) -> None:
    cpu = Cpu(sockets=2, threads=2, model="Nehalem", features=(CpuFeature(name="pdpe1gb"),))
    script.answer("vm", "get", vm_view(spec=VmSpec(domain=Domain(cpu=cpu))))
    script.answer("vm", "update", vm_view())
    ended = await cli("vm", "update", "web", "--cpus", cpus)
    assert ended.code == 0, ended.err
    after = VmSpec.model_validate(script.data("vm.update")[-1]["spec"]).domain.cpu
    topology = {"sockets": sockets, "cores": cores, "threads": threads}
    assert after == cpu.model_copy(update=topology)


async def test_a_file_written_by_get_is_sent_with_its_revision(
    script: Script, cli: Cli, tmp_path: Path
) -> None:
    script.answer("vm", "get", vm_view())
    script.answer("vm", "update", vm_view())
    written = (await cli("vm", "get", "web", "-o", "json")).json
    written["spec"]["termination_grace_s"] = 9
    file = tmp_path / "web.json"
    file.write_text(json.dumps(written | {"revision": 5}))
    ended = await cli("vm", "update", "web", "-f", str(file))
    assert ended.code == 0, ended.err
    sent = script.data("vm.update")[-1]
    assert (sent["revision"], sent["spec"]["termination_grace_s"]) == (5, 9)


async def test_an_update_without_a_change_is_refused_before_it_is_sent(
    script: Script, cli: Cli
) -> None:
    ended = await cli("vm", "update", "web")
    assert ended.code == 2
    assert "nothing to change" in ended.err
