"""infra/ names only what exists."""

import json
import re
from pathlib import Path

import pytest
import yaml

from pipelinerl_core.tracking.prometheus import metric_names as run_metric_names
from pipelinerl_core.tracking.role_metrics import ROLE_METRICS, role_metric_names

INFRA = Path(__file__).parents[2] / "infra"
DASHBOARDS = {
    name: json.loads((INFRA / "grafana" / "dashboards" / f"{name}.json").read_text())
    for name in ("pipelinerl", "pipelinerl-roles")
}
NAME = re.compile(r"pipelinerl_\w+")
each_dashboard = pytest.mark.parametrize("name", DASHBOARDS)


def metric_names():
    return run_metric_names() | role_metric_names()


def test_the_run_and_its_roles_share_no_name():
    assert not run_metric_names() & role_metric_names()


@each_dashboard
def test_every_query_of_a_dashboard_names_an_exported_metric(name):
    dashboard = DASHBOARDS[name]
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [variable["query"] for variable in dashboard["templating"]["list"]]
    assert len(queries) > 14
    for query in queries:
        assert set(NAME.findall(query)), query
        assert set(NAME.findall(query)) <= metric_names(), query


def test_every_alert_names_an_exported_metric_and_says_what_to_do():
    (group,) = yaml.safe_load((INFRA / "prometheus" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]:
        assert set(NAME.findall(rule["expr"])) <= metric_names(), rule["alert"]
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "description"}


def test_every_exported_metric_is_drawn_somewhere():
    assert run_metric_names() <= set(NAME.findall(json.dumps(DASHBOARDS["pipelinerl"])))
    drawn = json.dumps(DASHBOARDS["pipelinerl-roles"])
    assert [one.name for one in ROLE_METRICS if one.name not in drawn] == []


@each_dashboard
def test_panels_do_not_overlap(name):
    dashboard = DASHBOARDS[name]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
    sources = yaml.safe_load((INFRA / "grafana" / "provisioning" / "datasources" / "prometheus.yml").read_text())
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"]} == {sources["datasources"][0]["uid"]}
