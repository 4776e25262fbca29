"""PromQL that panels share. Every query is of one mesh: the job that the variable `job` names.

`$__rate_interval` is Grafana's: four scrapes at least, so a rate always has samples. A mean has no value where nothing
happened.
"""

MESH = 'job="$job"'
"""One mesh."""
MEMBER = 'job="$job", instance=~"$instance"'
"""Its processes that the dashboard is set to."""
WINDOW = "$__rate_interval"

_STAGE_INFO = 'kvmesh_stage_info{job="$job", pipeline=~"$pipeline"}'


def of(metric: str, labels: str = "", *, whose: str = MESH) -> str:
    """A selector."""
    return f"{metric}{{{', '.join(filter(None, (whose, labels)))}}}"


def rate(metric: str, labels: str = "", *, whose: str = MESH) -> str:
    """Its increase a second."""
    return f"rate({of(metric, labels, whose=whose)}[{WINDOW}])"


def staged(expr: str) -> str:
    """The same of the stages of the chosen pipelines, with pipeline and rank as labels."""
    return f"{expr} * on (job, instance) group_left (pipeline, rank) {_STAGE_INFO}"


def of_rank_0(expr: str) -> str:
    """The same of rank 0 of each chosen pipeline, with the pipeline as a label."""
    return f'{expr} * on (job, instance) group_left (pipeline) {_STAGE_INFO[:-1]}, rank="0"}}'


def quantile(q: float, histogram: str, *, by: str = "", whose: str = MESH) -> str:
    """A quantile of a histogram, over all its series or by labels."""
    labels = ", ".join(filter(None, ("le", by)))
    return f"histogram_quantile({q:g}, sum by ({labels}) ({rate(f'{histogram}_bucket', whose=whose)}))"


def mean(histogram: str, *, by: str = "", whose: str = MESH) -> str:
    """The mean of a histogram, over all its series or by labels; no value where nothing was observed."""
    summed = f"sum by ({by}) " if by else "sum"
    total, count = (f"{summed}({rate(f'{histogram}_{what}', whose=whose)})" for what in ("sum", "count"))
    return f"{total} / ({count} > 0)"


def events(counter: str, by: str) -> str:
    """How often something rare happened within the window, by labels; only what did, and "none" where nothing did."""
    return or_none(f"sum by ({by}) (increase({of(counter)}[{WINDOW}])) > 0", by)


def new_events(counter: str, by: str) -> str:
    """The same of a counter whose series begin with their first event, which increase() can't see: a series without a past
    counts as it stands."""
    now = of(counter)
    return or_none(f"sum by ({by}) (clamp_min({now} - {now} offset {WINDOW}, 0) or {now}) > 0", by)


def or_none(expr: str, by: str) -> str:
    """The query, or a 0 whose last label is "none" where it has no answer."""
    return f'{expr} or on () label_replace(vector(0), "{by.split(", ")[-1]}", "none", "", "")'
