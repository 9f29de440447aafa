"""Truncated state files of netd: forgotten whole, never read in part."""

from pathlib import Path

import pytest

from virtbus.netd.core.attachment import Attachment, CniState, Nic, NicKind
from virtbus.netd.edge.attachment_store import AttachmentStore
from virtbus.schemas.errors import VirtbusError

UIDS = [f"0192f0c1-2d3e-7abc-8def-{number:012x}" for number in (1, 2)]


def attachment(uid: str) -> Attachment:
    nic = Nic(
        index=0,
        name="default",
        network="blue",
        kind=NicKind.CNI,
        mac="02:00:00:00:00:01",
        host_link="vb0",
        addresses=("10.0.0.5/16",),
        cni=CniState(conflist={"name": "blue", "plugins": []}, result={"ips": []}),
    )
    return Attachment(uid=uid, epoch=3, generation=2, nics=(nic,))


def test_a_file_cut_at_any_byte_is_forgotten_and_the_others_stay(tmp_path: Path) -> None:
    files = AttachmentStore(tmp_path)
    files.prepare()
    one, two = (attachment(uid) for uid in UIDS)
    files.write(two)
    files.write(one)
    path = tmp_path / f"{UIDS[0]}.json"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert files.all() == [two], length
        assert not path.exists()
    files.write(one)
    assert files.all() == [one, two]
    files.close()


def test_a_file_with_a_value_of_a_later_release_stays_and_names_the_next_step(
    tmp_path: Path,
) -> None:
    files = AttachmentStore(tmp_path)
    files.prepare()
    files.write(attachment(UIDS[0]))
    path = tmp_path / f"{UIDS[0]}.json"
    text = path.read_text().replace('"kind":"cni"', '"kind":"quantum"')
    path.write_text(text)
    with pytest.raises(VirtbusError, match=r"at nics\.0\.kind .* install the newer virtbus again"):
        files.all()
    assert path.read_text() == text
    path.write_text("[]")
    assert files.all() == []
    files.close()
