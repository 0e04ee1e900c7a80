"""Dashboards, alerts and autoscalers ask for metrics and labels that the services export."""

from __future__ import annotations

import importlib
import json
import re
from functools import cache
from typing import TYPE_CHECKING, Any

import promql_parser
import pytest
import yaml
from prometheus_client import REGISTRY, CollectorRegistry

from gateway.console.self_attack import SelfAttack, SelfAttackMetrics
from gateway.metrics import GatewayMetrics
from tests.deploy.helm.chart import CHART, named, render
from tests.deploy.helm.value_sets import VALUE_SETS

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = CHART.parents[2]
RULES = CHART / "alerts" / "pando.rules.yaml"
DASHBOARDS = sorted((CHART / "dashboards").glob("*.json"))
# What Prometheus itself adds to whatever it scrapes.
SCRAPED = {"namespace", "pod", "job", "instance", "service", "container"}
# What can be scaled, and how the names of the value sets begin in which it is.
SCALED = {"gateway": "", "tokenizer": "", "group": "groups-"}
SUFFIXES = {"counter": ("_total", "_created"), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


@cache
def exported() -> dict[str, frozenset[str]]:
    """Return the labels of every series that a service exports, by its name, from the services' own registries."""
    gateway = CollectorRegistry()
    GatewayMetrics(gateway)
    gateway.register(SelfAttackMetrics(SelfAttack(None)))
    importlib.import_module("common.audit.log")
    importlib.import_module("common.metrics")
    for path in sorted((ROOT / "services").glob("*/metrics.py")):
        importlib.import_module(f"services.{path.parent.name}.metrics")
    series: dict[str, frozenset[str]] = {}
    for registry in (REGISTRY, gateway):
        for collector in list(registry._collector_to_names):  # no public way leads to the names of labels
            described: Any = collector
            for family in described.describe() if hasattr(described, "describe") else described.collect():
                labels = frozenset(getattr(collector, "_labelnames", getattr(family, "_labelnames", ())))
                for suffix in SUFFIXES.get(family.type, ("",)):
                    more = {"le"} if suffix == "_bucket" else set()
                    series[family.name + suffix] = labels | more
    return series


def recorded() -> dict[str, frozenset[str]]:
    """Return the series that our own rules record; their expressions are checked by themselves."""
    return {rule["record"]: frozenset() for rule in rules() if "record" in rule}


def rule_queries() -> Iterator[tuple[str, str]]:
    for rule in rules():
        yield rule.get("alert") or rule["record"], rule["expr"]


def dashboard_queries() -> Iterator[tuple[str, str]]:
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                yield f"{path.stem}: {panel['title']} {target['refId']}", target["expr"]


def variable_queries() -> Iterator[tuple[str, str]]:
    for path in DASHBOARDS:
        for variable in json.loads(path.read_text())["templating"]["list"]:
            if variable["type"] == "query":
                selector = re.fullmatch(r"label_values\((.*), \w+\)", variable["query"]["query"])
                yield f"{path.stem}: ${variable['name']}", selector[1] if selector else variable["query"]["query"]


def scaler_queries() -> Iterator[tuple[str, str]]:
    sets = [*(f"{name}keda" for name in SCALED.values()), "roles"]
    scalers = [item for name in sets for item in render(VALUE_SETS[name]) if item["kind"] == "ScaledObject"]
    for scaler in scalers:
        for trigger in scaler["spec"]["triggers"]:
            if trigger["type"] == "prometheus":
                query = trigger["metadata"]["query"]
                yield f"keda: {scaler['metadata']['name']} {query.split('{')[0]}", query


QUERIES = dict([*rule_queries(), *dashboard_queries(), *variable_queries(), *scaler_queries()])


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_queries_use_only_exported_metrics(query: str) -> None:
    assert problems(query) == []


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("pando_gateway_open_request", "no service exports pando_gateway_open_request"),
        ("sum by (status) (rate(pando_gateway_completion_tokens_total[5m]))", "no metric has the label status"),
        ('pando_scheduler_pages{tiers="device"}', "pando_scheduler_pages has no label tiers"),
        ("sum(rate(pando_gateway_open_requests", "does not parse"),
    ],
)
def test_a_wrong_query_is_noticed(query: str, problem: str) -> None:
    assert any(problem in found for found in problems(query))


def test_the_autoscaler_asks_for_metrics_of_pods_that_exist() -> None:
    for component, prefix in SCALED.items():
        metrics = named(render(VALUE_SETS[f"{prefix}hpa"]), "HorizontalPodAutoscaler", component)["spec"]["metrics"]
        [name] = [metric["pods"]["metric"]["name"] for metric in metrics if metric["type"] == "Pods"]
        assert name in exported()


def test_the_states_and_tiers_that_queries_name_are_reported() -> None:
    source = "".join(path.read_text() for path in (ROOT / "services" / "scheduler").rglob("*.py"))
    named_in = "\n".join(QUERIES.values())
    for label in ("tier", "state"):
        values = set(re.findall(rf'\b{label}="([^"]+)"', named_in))
        assert values, f"no query names a {label}"
        for value in values:
            assert re.search(rf'"{value}"|\b{value}_pages|\b{value}\b', source), f"nothing is ever {value}"


def test_dashboards_are_in_the_chart_whole() -> None:
    objects = render(VALUE_SETS["monitoring"])
    for path in DASHBOARDS:
        data = named(objects, "ConfigMap", f"dashboard-{path.stem}")["data"]
        assert json.loads(data[f"pando-{path.name}"]) == json.loads(path.read_text())


def test_rules_are_in_the_chart_as_they_are() -> None:
    rule = named(render(VALUE_SETS["monitoring"]), "PrometheusRule", "rules")
    assert rule["spec"] == yaml.safe_load(RULES.read_text())


def test_every_alert_has_a_severity_a_summary_and_a_description() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len(alerts) >= 5
    for rule in alerts:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}


def problems(query: str) -> list[str]:
    """Return the errors of a PromQL query, given the metrics that the services export."""
    try:
        tree = promql_parser.parse(_without_variables(query))
    except ValueError as error:
        return [f"does not parse: {error}"]
    known = exported() | recorded()
    found: list[str] = []
    labels: set[str] = set(SCRAPED)
    groupings: set[str] = set()
    for node in _nodes(tree):
        if isinstance(node, promql_parser.VectorSelector):
            own = known.get(node.name or "")
            if own is None:
                found.append(f"no service exports {node.name}")
                continue
            labels |= own
            found += [
                f"{node.name} has no label {matcher.name}"
                for matcher in node.matchers.matchers
                if matcher.name not in own | SCRAPED
            ]
        elif isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            groupings |= set(node.modifier.labels)
    return found + [f"no metric has the label {label}" for label in sorted(groupings - labels)]


def _without_variables(query: str) -> str:
    """Put values in the place of Grafana's variables."""
    return re.sub(r"\$(namespace|model|pod)\b", ".*", query.replace("$__rate_interval", "5m"))


def _nodes(node: Any) -> Iterator[Any]:
    """Walk a parsed query; the parser's classes have no common base."""
    yield node
    for name in ("expr", "lhs", "rhs", "param", "vector_selector"):
        if (child := getattr(node, name, None)) is not None:
            yield from _nodes(child)
    for argument in getattr(node, "args", None) or ():
        yield from _nodes(argument)
