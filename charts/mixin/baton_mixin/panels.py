"""Panels as all rows use them: a title, what it means, a unit, and queries with their legends.

Owns looks and sizes. Knows no metric.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as dashboard_models

Panel = stat.Panel | timeseries.Panel
AnyPanel = TypeVar("AnyPanel", stat.Panel, timeseries.Panel)

DATASOURCE = dashboard_models.DataSourceRef(type_val="prometheus", uid="${datasource}")
HEIGHT = 8
STAT_HEIGHT = 4


class Query(NamedTuple):
    """An expression and how its series are named."""

    expression: str
    legend: str


class Row(NamedTuple):
    """A row of a dashboard and its panels, in order."""

    title: str
    panels: list[Panel]


def graph(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    stacked: bool = False,
    is_log: bool = False,
) -> timeseries.Panel:
    """Return a panel of lines over time; `unit` is one of Grafana's unit ids."""
    mode = common_models.StackingMode.NORMAL if stacked else common_models.StackingMode.NONE
    legend = (
        common.VizLegendOptions()
        .display_mode(common_models.LegendDisplayMode.LIST)
        .placement(common_models.LegendPlacement.BOTTOM)
        .show_legend(True)
    )
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .height(HEIGHT)
        .legend(legend)
        .tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
        .stacking(common.StackingConfig().mode(mode))
        .fill_opacity(25 if stacked else 8)
    )
    if not is_log:
        panel = panel.min(0)
    else:
        scale = common.ScaleDistributionConfig().type(common_models.ScaleDistribution.LOG).log(10)
        panel = panel.scale_distribution(scale)
    return _with_queries(panel, queries)


def number(title: str, description: str, unit: str, query: Query) -> stat.Panel:
    """Return a panel of one number and its recent course."""
    panel = (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .height(STAT_HEIGHT)
        .color_mode(common_models.BigValueColorMode.VALUE)
        .graph_mode(common_models.BigValueGraphMode.AREA)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    )
    return _with_queries(panel, (query,))


def _with_queries(panel: AnyPanel, queries: tuple[Query, ...]) -> AnyPanel:
    for letter, query in zip("ABCDEFGH", queries, strict=False):
        panel = panel.with_target(
            prometheus.Dataquery()
            .datasource(DATASOURCE)
            .expr(query.expression)
            .legend_format(query.legend)
            .ref_id(letter)
            .range()
        )
    return panel


def variable(name: str, label: str, query: str) -> dashboard.QueryVariable:
    """Return a template variable that lists a label's values; all of them at first."""
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .query(query)
        .datasource(DATASOURCE)
        .refresh(dashboard_models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard_models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(dashboard_models.VariableOption(text="All", value="$__all", selected=True))
    )
