"""The injector's alerts ask for what it exports, fire for their causes, and lead to their pages."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any

import promql_parser
import pytest
import yaml
from slotcar_injector.metrics import Metrics

from tests.k8s import charts
from tests.k8s.environment import REPOSITORY

Json = dict[str, Any]
RULES = REPOSITORY / "deploy" / "prometheus" / "slotcar-injector.rules.yaml"
ALERTS = [rule for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]]
# A sample's name and labels, as a scrape has them.
_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? ", re.MULTILINE)


@pytest.fixture(params=ALERTS, ids=lambda rule: rule["alert"])
def alert(request: pytest.FixtureRequest) -> Json:
    found: Json = request.param
    return found


def selectors(expression: str) -> list[promql_parser.VectorSelector]:
    found: list[promql_parser.VectorSelector] = []

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)

    promql_parser.walk(promql_parser.parse(expression), visit)
    return found


def test_an_alert_asks_for_what_is_exported(alert: Json) -> None:
    exported: dict[str, set[str]] = {}
    for name, labels in _SAMPLE.findall(Metrics("1").text().decode()):
        exported.setdefault(name, set()).update(labels.split(","))
    for selector in selectors(alert["expr"]):
        for matcher in selector.matchers.matchers:
            if selector.name == "up":
                assert matcher.name == "job"
            else:
                assert f'{matcher.name}="{matcher.value}"' in exported[selector.name], "from the start, at 0"
        assert selector.name in exported.keys() | {"up"}


def test_the_jobs_are_those_of_the_monitors() -> None:
    """And the sidecars' alerts mean none of the injector's."""
    monitors = charts.of_kind(charts.rendered(charts.values_of("everything")), "PodMonitor")
    jobs = [each["spec"]["podMetricsEndpoints"][0]["relabelings"][0]["replacement"] for each in monitors]
    found = [regex(expression) for expression in expressions("up")]
    assert [[bool(re.fullmatch(each, job)) for job in jobs] for each in sorted(set(found))] == [
        [False, True],
        [True, False],
    ]


def expressions(name: str) -> list[promql_parser.VectorSelector]:
    """Each use of this metric in all of the chart's rules."""
    (rules,) = charts.of_kind(charts.rendered(charts.values_of("everything")), "PrometheusRule")
    texts = [rule["expr"] for group in rules["spec"]["groups"] for rule in group["rules"]]
    return [selector for text in texts for selector in selectors(text) if selector.name == name]


def regex(selector: promql_parser.VectorSelector) -> str:
    (matcher,) = selector.matchers.matchers
    return str(matcher.value)


def test_an_alert_says_how_bad_it_is_and_leads_to_its_page(alert: Json) -> None:
    assert alert["labels"]["severity"] in ("critical", "warning")
    page, _, anchor = alert["annotations"]["runbook_url"].partition("#")
    headings = re.findall(r"^##+ (.+)$", (REPOSITORY / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert anchor in {heading.lower().replace(" ", "-") for heading in headings}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool: run make apt")
@pytest.mark.parametrize(
    "words",
    [
        ("check", "rules", "--lint=all", "--lint-fatal", str(RULES)),
        ("test", "rules", "tests/k8s/slotcar-injector.rules.test.yaml"),
    ],
    ids=["sound", "fires"],
)
def test_prometheus_reads_them_and_each_fires_for_its_cause(words: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *words], cwd=REPOSITORY, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
