"""Each later version reads the state folder and the backup that 0.2 wrote (ADR 0040).

`state-0.2/` was written by 0.2.0: a VM with user data and a label, a deleted one, a cordoned node.
It is never changed. So a release that cannot read its predecessor's state fails here.
"""

import shutil
from pathlib import Path

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.provisioning.backup import parse, put_back
from virtbus.bus.provisioning.specs import specs
from virtbus.imaged.core.links import NameLink
from virtbus.netd.edge.attachment_store import AttachmentStore
from virtbus.nodeagent.edge.record_files import AgentFiles
from virtbus.schemas import subjects
from virtbus.schemas.api import VmCreate
from virtbus.schemas.node import NodeSpec
from virtbus.schemas.records import read_record, read_stored
from virtbus.schemas.vm import VmRecord, VmSecrets
from virtbus.schemas.wire import read, validate

WRITTEN = Path(__file__).with_name("state-0.2")
NODE = "e2e"
UID = "01a2097c-316e-7aca-ade8-32b5929044b5"
GONE = "01a2097c-3753-7705-9fb9-c5e28d2f3029"


async def test_the_agent_adopts_the_state_folder_of_0_2(tmp_path: Path) -> None:
    shutil.copytree(WRITTEN / "state", tmp_path / "state")
    files = AgentFiles(tmp_path / "state", tmp_path / "run")
    files.open(NODE)
    record = (await files.list())[UID]
    assert (record.name, record.labels, record.powered) == ("web", {"tier": "front"}, True)
    assert (files.epoch(UID), set(files.removed())) == (1, {GONE})
    assert files.node_spec() == read(NodeSpec, (WRITTEN / "state/agent/node_spec").read_bytes())
    assert len(files.nonce()) == 32
    files.close()


def test_netd_and_imaged_read_their_files_of_0_2(tmp_path: Path) -> None:
    shutil.copytree(WRITTEN / "state/netd/vms", tmp_path / "vms")
    store = AttachmentStore(tmp_path / "vms")
    store.prepare()
    (attachment,) = store.all()
    assert (attachment.uid, attachment.vm_name) == (UID, "web")
    store.close()
    (link,) = (WRITTEN / "state/images/links").iterdir()
    assert read(NameLink, link.read_bytes()).name == "halt"


async def test_a_backup_of_0_2_is_restored() -> None:
    with (WRITTEN / "backup").open("rb") as file:
        backup = parse(file)
    bus = MemoryBus(MemoryServer())
    assert (await put_back(bus, backup)).vms == [UID]
    entry = await bus.get(subjects.vm_record(NODE, UID))
    assert entry is not None
    record = read_record(entry.key, entry.value)
    assert isinstance(record, VmRecord)
    assert record.name == "web"
    secrets = read_stored(VmSecrets, "", backup.values[subjects.vm_secret(NODE, UID)])
    assert "hostname: kept" in (secrets.cloud_init["cloudinit"].user_data or "")
    (request,) = specs(backup)
    assert validate(VmCreate, request).name == "web"
