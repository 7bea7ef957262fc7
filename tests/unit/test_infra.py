"""infra/ names only what exists."""

import json
import re
from pathlib import Path

import yaml

from pipelinerl_core.tracking.prometheus import metric_names

INFRA = Path(__file__).parents[2] / "infra"
DASHBOARD = json.loads((INFRA / "grafana" / "dashboards" / "pipelinerl.json").read_text())
NAME = re.compile(r"pipelinerl_\w+")


def test_every_query_of_a_dashboard_names_an_exported_metric():
    queries = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    queries += [variable["query"] for variable in DASHBOARD["templating"]["list"]]
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
    drawn = set(NAME.findall(json.dumps(DASHBOARD)))
    assert metric_names() <= drawn


def test_panels_do_not_overlap():
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
    sources = yaml.safe_load((INFRA / "grafana" / "provisioning" / "datasources" / "prometheus.yml").read_text())
    assert {panel["datasource"]["uid"] for panel in DASHBOARD["panels"]} == {sources["datasources"][0]["uid"]}
