"""What operators deploy beside slotcar fits what it exports: the rules, their runbook, and the dashboard."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml
from slotcar_sidecar.ops.catalogue import ADAPTER_METRICS, CATALOGUE

from tests.golden import dashboard
from tests.unit.ops.promql import DASHBOARD, exported, faults, parsed, queries, selectors

REPOSITORY = Path(__file__).resolve().parents[3]
RULES_FILE = REPOSITORY / "deploy" / "prometheus" / "slotcar.rules.yaml"
RULES = [rule for group in yaml.safe_load(RULES_FILE.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]]
ALERTS = [rule for rule in RULES if "alert" in rule]
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
RULE_TESTS = yaml.safe_load((REPOSITORY / "tests/ops/slotcar.rules.test.yaml").read_text(encoding="utf-8"))["tests"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_a_rule_asks_for_what_is_exported(rule: dict[str, Any]) -> None:
    assert list(faults(rule["expr"], RECORDED)) == []


@pytest.mark.parametrize(("title", "expression"), queries())
def test_a_panel_asks_for_what_is_exported(title: str, expression: str) -> None:
    assert list(faults(expression)) == []


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("slotcar_forward_total", "slotcar_forward_total is no metric"),
        ('slotcar_slots{tier="host"}', "slotcar_slots has no label tier"),
        ('rate(slotcar_forwards_total{code="OK"}[5m])', "slotcar_forwards_total has no label code"),
        ("sum by (stage) (slotcar_slots)", "no label stage to group by"),
    ],
)
def test_an_expression_that_fits_nothing_is_named(expression: str, fault: str) -> None:
    assert list(faults(expression)) == [fault]


def test_every_metric_has_a_panel() -> None:
    """But the generation, which means nothing without its epoch, and what routers read."""
    shown = {selector.name for _, expression in queries() for selector in selectors(parsed(expression))}
    unshown = {one.name for one in CATALOGUE if not shown & set(one.sample_names)}
    assert unshown == {"slotcar_layout_generation", "slotcar_lora_requests_info"}
    assert shown <= exported().keys()


def test_the_dashboard_is_built_from_its_code() -> None:
    built = runpy.run_path(str(DASHBOARD.with_name("dashboard.py")))["text"]()
    assert DASHBOARD.read_text(encoding="utf-8") == built, "run make golden"


def test_the_panels_are_written_down() -> None:
    page = dashboard.PAGE.read_text(encoding="utf-8")
    assert page == dashboard.page_with_tables(page), "run make docs"


@pytest.mark.parametrize("alert", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_says_how_bad_it_is_and_leads_to_its_page(alert: dict[str, Any]) -> None:
    name = alert["alert"]
    assert alert["labels"]["severity"] in ("critical", "warning")
    assert "$labels.instance" in alert["annotations"]["summary"]
    page, _, anchor = alert["annotations"]["runbook_url"].partition("#")
    assert anchor == name.lower()
    section = (REPOSITORY / page).read_text(encoding="utf-8").partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\*\*(\w[\w ]*)\*\*", section, re.MULTILINE) == ["Means", "Look at", "Do"]


def test_the_runbook_has_no_alert_that_there_is_not() -> None:
    headings = re.findall(r"^## (.+)$", (REPOSITORY / "docs/runbook.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings == [alert["alert"] for alert in ALERTS]


def test_each_alert_fires_in_a_rules_test() -> None:
    """`promtool test rules` runs them: see tests/ops."""
    cases = [case for each in RULE_TESTS for case in each.get("alert_rule_test", ())]
    fires = {case["alertname"] for case in cases if case.get("exp_alerts")}
    assert fires == {alert["alert"] for alert in ALERTS}


def test_only_gauges_name_adapters() -> None:
    named = [one for one in CATALOGUE if {"adapter", "running_lora_adapters"} & set(one.labels)]
    assert [one.name for one in named] == list(ADAPTER_METRICS)
    assert {one.kind for one in named} == {"gauge"}


def test_the_pod_monitor_scrapes_what_the_server_serves() -> None:
    monitor = yaml.safe_load((REPOSITORY / "deploy/prometheus/podmonitor.yaml").read_text(encoding="utf-8"))
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert (monitor["kind"], endpoint["path"]) == ("PodMonitor", "/metrics")
    # The operator names the job after the namespace and the monitor; the rules know it by the latter.
    assert monitor["metadata"]["name"] == "slotcar"
