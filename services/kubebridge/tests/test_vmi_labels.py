"""Labels of a VMI that change while its guest runs."""

from services.kubebridge.tests.world import world


def test_a_changed_label_of_a_vmi_is_that_of_its_vm_on_the_bus() -> None:
    w = world()
    w.settle()
    assert w.vmi is not None
    before = dict(w.views[w.uid].labels)
    w.vmi["metadata"]["labels"]["app"] = "web"
    w.settle()
    assert w.views[w.uid].labels == before | {"app": "web"}
    del w.vmi["metadata"]["labels"]["app"]
    w.settle()
    assert w.views[w.uid].labels == before
    revision = w.views[w.uid].revision
    w.settle()
    assert w.views[w.uid].revision == revision, "equal labels are not sent again"
    w.vmi["metadata"]["labels"]["app"] = "!"
    w.settle()
    assert w.views[w.uid].labels == before
    (trouble,) = [one for one in w.vmi["status"]["conditions"] if one["type"] == "Synchronized"]
    assert "metadata.labels" in trouble["message"]
