"""What docs/kubernetes.md says of values at an upgrade to a newer chart, by Helm itself."""

from __future__ import annotations

import shutil
from pathlib import Path

import helm_python as helm
import pytest
import yaml

from tests.k8s import charts
from tests.k8s.objects import serving
from tests.k8s.test_helm_certificates import configured


def older(folder: Path) -> Path:
    """The chart from before `serving.pollSeconds`."""
    chart = folder / "slotcar"
    shutil.copytree(charts.CHART, chart)
    values = yaml.safe_load((chart / "values.yaml").read_text(encoding="utf-8"))
    del values["serving"]["pollSeconds"]
    (chart / "values.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    (chart / "values.schema.json").unlink()
    return chart


def test_values_of_an_older_chart_are_refused_and_its_user_s_are_not(tmp_path: Path) -> None:
    """`--reset-then-reuse-values` gives a newer chart its user's values over its own, as this does."""
    release, own = charts.RELEASE, charts.IMAGES
    with serving("1.31") as cluster, configured(cluster) as config:
        config.install(older(tmp_path), release, own, namespace=charts.NAMESPACE)
        with pytest.raises(helm.HelmError, match="pollSeconds"):
            config.upgrade(charts.CHART, release, {}, namespace=charts.NAMESPACE, reuse_values=True)
        config.upgrade(charts.CHART, release, own, namespace=charts.NAMESPACE, reset_values=True)
