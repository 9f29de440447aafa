"""`deploy/kubernetes/manifests/`: the Helm chart beside it, rendered with its own values.

Of Helm's language the chart uses what is read here, nothing else: a value, a value of the release,
and a block that is there if a value is. tests/kubernetes/test_chart.py compares with Helm itself.
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
_NOTE = """# Written by `python -m virtbus.schemas.generate` (make docs) from the chart; edit that.
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
    """All of a chart's templates, with a namespace before them."""
    values = yaml.safe_load((chart / "values.yaml").read_text(encoding="utf-8"))
    given = {"Values": values, "Release": {"Namespace": NAMESPACE}}
    files = sorted((chart / "templates").glob("*.yaml"))
    return _NOTE + "".join("---\n" + rendered(path.read_text("utf-8"), given) for path in files)


def rendered(template: str, given: Mapping[str, Any]) -> str:
    """One template. ValueError: it says what Helm may understand and this does not."""
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
