"""Renders `deploy/kubernetes/manifests/` from the Helm chart next to it, with default values.

The chart uses only three features of Helm: a value, a value of the release, and a block that
depends on a value. tests/kubernetes/test_chart.py compares the result with Helm's output.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

NAMESPACE = "kubevirt"
_VALUE = re.compile(r"\{\{ \.([A-Za-z.]+) \}\}")
_IF = re.compile(r"\{\{- if \.([A-Za-z.]+) \}\}")
_END = "{{- end }}"
_NOTE = """# Written by `python -m virtbus.documents` (make docs) from the chart; edit that.
# Apply crds/ first, and a Secret virtbus-bus: docs/howto/kubernetes.md.
apiVersion: v1
kind: Namespace
metadata:
  name: kubevirt
  labels:
    app.kubernetes.io/name: virtbus-kubebridge
    pod-security.kubernetes.io/enforce: restricted
"""


def manifests(chart: Path) -> str:
    """Return the Namespace and all rendered templates of a chart as one YAML text."""
    values = yaml.safe_load((chart / "values.yaml").read_text(encoding="utf-8"))
    given = {"Values": values, "Release": {"Namespace": NAMESPACE}}
    files = sorted((chart / "templates").glob("*.yaml"))
    return _NOTE + "".join("---\n" + rendered(path.read_text("utf-8"), given) for path in files)


def rendered(template: str, given: Mapping[str, Any]) -> str:
    """Render one template; raise ValueError for syntax that this module does not support."""
    return "".join(_lines(template, given))


def _lines(template: str, given: Mapping[str, Any]) -> Iterator[str]:
    told = True
    for line in template.splitlines(keepends=True):
        if begins := _IF.fullmatch(line.strip()):
            told = bool(_at(given, begins[1]))
        elif line.strip() == _END:
            told = True
        elif told:
            filled = _VALUE.sub(lambda found: str(_at(given, found[1])), line)
            if "{{" in filled:
                msg = f"{line.strip()}: more than a value of the chart"
                raise ValueError(msg)
            yield filled


def _at(given: Any, path: str) -> Any:
    for name in path.split("."):
        given = given[name]
    return given
