"""The three dashboards: their rows, variables and links. Owns uids: they never change."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import dashboard as models

from baton_mixin.panels import Row, variable
from baton_mixin.rows import (
    acceptance,
    capacity,
    device,
    first_token,
    logprobs,
    loss,
    operator_api,
    operator_children,
    operator_work,
    output,
    overview,
    requests,
    spared,
    wire,
)

TAG = "baton"
WHOLE_WIDTH = 24
_INFO = "baton_wire_info"


def serving() -> models.Dashboard:
    """Return Serving: what clients see, and where time and room go."""
    builder = _dashboard("baton-serving", "Baton / Serving", "What clients see, and why.")
    builder = _with_rows(
        _with_workload(builder),
        [
            overview.row,
            requests.row,
            spared.row,
            first_token.row,
            output.row,
            capacity.row,
            device.row,
        ],
    )
    return builder.build()


def mtp_and_logprobs() -> models.Dashboard:
    """Return MTP and logprobs: what drafting yields and what logprobs cost."""
    about = "What drafting yields, what logprobs cost, and that no token is lost."
    builder = _dashboard("baton-mtp-logprobs", "Baton / MTP and logprobs", about)
    builder = _with_rows(
        _with_workload(builder), [acceptance.row, logprobs.row, wire.row, loss.row]
    )
    return builder.build()


def operator() -> models.Dashboard:
    """Return Operator: what the control plane does."""
    builder = _dashboard("baton-operator", "Baton / Operator", "What the control plane does.")
    leader = "baton_operator_leader"
    builder = builder.with_variable(
        variable("namespace", "Namespace", f"label_values({leader}, namespace)")
    ).with_variable(
        variable("job", "Job", f'label_values({leader}{{namespace=~"$namespace"}}, job)')
    )
    builder = _with_rows(builder, [operator_work.row, operator_children.row, operator_api.row])
    return builder.build()


def every() -> dict[str, models.Dashboard]:
    """Return all dashboards by file name."""
    return {
        "serving.json": serving(),
        "mtp-logprobs.json": mtp_and_logprobs(),
        "operator.json": operator(),
    }


def _dashboard(uid: str, title: str, description: str) -> dashboard.Dashboard:
    source = dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    link = (
        dashboard.DashboardLink("Baton")
        .type(models.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .as_dropdown(True)
        .include_vars(True)
        .keep_time(True)
    )
    return (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags([TAG])
        .readonly()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .refresh("30s")
        .timezone("browser")
        .with_variable(source)
        .link(link)
    )


def _with_workload(builder: dashboard.Dashboard) -> dashboard.Dashboard:
    """Add the variables that choose workers; a PDDeployment is a job, `namespace/name`."""
    chosen = 'namespace=~"$namespace"'
    for name, label, source in (
        ("namespace", "Namespace", f"label_values({_INFO}, namespace)"),
        ("deployment", "Deployment", f"label_values({_INFO}{{{chosen}}}, job)"),
        ("model", "Model", f'label_values({_INFO}{{{chosen},job=~"$deployment"}}, model)'),
        ("role", "Role", f'label_values({_INFO}{{{chosen},job=~"$deployment"}}, role)'),
    ):
        builder = builder.with_variable(variable(name, label, source))
    return builder


def _with_rows(
    builder: dashboard.Dashboard, rows: Sequence[Callable[[], Row]]
) -> dashboard.Dashboard:
    for make in rows:
        made = make()
        builder = builder.with_row(dashboard.Row(made.title))
        width = WHOLE_WIDTH // len(made.panels)
        for panel in made.panels:
            builder = builder.with_panel(panel.span(width))
    return builder
