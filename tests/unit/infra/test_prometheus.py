"""infra/ names only what exists."""

import json
import re
from pathlib import Path

import pytest
import yaml

from pipelinerl_core.telemetry.metrics import METRICS

INFRA = Path(__file__).parents[3] / "infra"
DASHBOARDS = {
    name: json.loads((INFRA / "grafana" / "dashboards" / f"{name}.json").read_text())
    for name in ("pipelinerl", "pipelinerl-roles")
}
NAME = re.compile(r"pipelinerl_\w+")
EXPORTED = [metric for metric in METRICS.values() if metric.prometheus]
METRIC_NAMES = {name for metric in EXPORTED for name in metric.series}
each_dashboard = pytest.mark.parametrize("name", DASHBOARDS)


def queries_of(dashboard):
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return queries + [variable["query"] for variable in dashboard["templating"]["list"]]


def named_by(query):
    """Names in a query; of __name__=~"..." those of exported metrics that match."""
    patterns = re.findall(r'__name__=~"([^"]+)"', query)
    matching = {name for pattern in patterns for name in METRIC_NAMES if re.fullmatch(pattern, name)}
    return matching | set(NAME.findall(re.sub(r'__name__=~"[^"]+"', "", query)))


@each_dashboard
def test_every_query_of_a_dashboard_names_an_exported_metric(name):
    queries = queries_of(DASHBOARDS[name])
    assert len(queries) > 14
    for query in queries:
        names = named_by(query)
        assert names or "$metric" in query, query
        assert names <= METRIC_NAMES, query


def test_every_alert_names_an_exported_metric_and_has_a_description():
    (group,) = yaml.safe_load((INFRA / "prometheus" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]:
        assert set(NAME.findall(rule["expr"])) <= METRIC_NAMES, rule["alert"]
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "description"}


def test_alerts_go_to_a_receiver_whose_url_is_a_secret_of_compose():
    config = yaml.safe_load((INFRA / "prometheus" / "alertmanager.yml").read_text())
    assert config["route"]["receiver"] in {receiver["name"] for receiver in config["receivers"]}
    (slack,) = config["receivers"][0]["slack_configs"]
    secrets = yaml.safe_load((INFRA / "compose.yaml").read_text())["secrets"]
    assert slack["api_url_file"] in {f"/run/secrets/{name}" for name in secrets}
    prometheus = yaml.safe_load((INFRA / "prometheus" / "prometheus.yml").read_text())
    (managers,) = prometheus["alerting"]["alertmanagers"]
    assert managers["static_configs"] == [{"targets": ["alertmanager:9093"]}]


def test_every_exported_metric_is_drawn_somewhere():
    drawn = {name: set().union(*map(named_by, queries_of(DASHBOARDS[name]))) for name in DASHBOARDS}
    for metric in EXPORTED:
        dashboard = "pipelinerl-roles" if metric.group == "role" else "pipelinerl"
        assert drawn[dashboard] & set(metric.series), f"{metric.prometheus} is in no panel of {dashboard}"


@each_dashboard
def test_panels_do_not_overlap(name):
    dashboard = DASHBOARDS[name]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
    sources = yaml.safe_load((INFRA / "grafana" / "provisioning" / "datasources" / "prometheus.yml").read_text())
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"]} == {sources["datasources"][0]["uid"]}
