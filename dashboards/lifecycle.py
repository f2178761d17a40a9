"""*Router and lifecycle*: where requests go, which instances there are, what happens when one is lost."""

from conflux_ray.metrics import definitions as m
from dashboards.panels import Dashboard, Panel, Query, Row, by, rate, select

LIFECYCLE = Dashboard(
    uid="conflux-lifecycle",
    title="Conflux / Router and lifecycle",
    description="Instances as the router sees them, migrations, refusals, starts and drains.",
    rows=(
        Row(
            "Instances",
            (
                Panel(
                    "Ready instances",
                    "Instances that take requests, as the ingress that sees the fewest sees them.",
                    (Query(by(select(m.ROUTER_READY), "model", how="min"), "{{model}}"),),
                    "short",
                    kind="stat",
                    width=6,
                    base="red",
                    thresholds=((1, "green"),),
                ),
                Panel(
                    "Draining instances",
                    "Instances that end their requests and take no new ones.",
                    (Query(by(select(m.ROUTER_DRAINING), "model", how="max"), "{{model}}"),),
                    "short",
                    kind="stat",
                    width=6,
                    thresholds=((1, "orange"),),
                ),
                Panel(
                    "Ingress replicas",
                    "Processes that take HTTP requests.",
                    (Query(by(select(m.INGRESS_IN_FLIGHT), "model", how="count"), "{{model}}"),),
                    "short",
                    kind="stat",
                    width=6,
                ),
                Panel(
                    "Slowest start",
                    "Longest time from the start of an instance's process until it served, of those that run.",
                    (Query(by(select(m.INSTANCE_START), "model", how="max"), "{{model}}"),),
                    "s",
                    kind="stat",
                    width=6,
                ),
                Panel(
                    "Ready and draining",
                    "Instances as the ingress that sees the fewest sees them.",
                    (
                        Query(by(select(m.ROUTER_READY), "model", how="min"), "{{model}} ready"),
                        Query(by(select(m.ROUTER_DRAINING), "model", how="max"), "{{model}} draining"),
                    ),
                    "short",
                ),
                Panel(
                    "Sessions",
                    "Sessions between ingresses and instances that were opened and that ended, per second. Ends "
                    "without a deployment or a scale-down are losses.",
                    (
                        Query(by(rate(m.ROUTER_SESSIONS_OPENED), "model"), "{{model}} opened"),
                        Query(by(rate(m.ROUTER_SESSIONS_ENDED), "model"), "{{model}} ended"),
                    ),
                    "ops",
                ),
                Panel(
                    "Migrations",
                    "Requests tried again on another instance, by why. Clients see a pause, no error.",
                    (Query(by(rate(m.MIGRATED), "reason"), "{{reason}}"),),
                    "reqps",
                    stacked=True,
                ),
            ),
        ),
        Row(
            "Router",
            (
                Panel(
                    "Queued work",
                    "Seconds of work on each instance as the router sees it. The next request goes to the least.",
                    (Query(by(select(m.ROUTER_QUEUED_WORK), "instance_id", how="max"), "{{instance_id}}"),),
                    "s",
                ),
                Panel(
                    "Requests in flight",
                    "Requests of all ingresses on each instance.",
                    (Query(by(select(m.ROUTER_REQUESTS), "instance_id"), "{{instance_id}}"),),
                    "short",
                ),
                Panel(
                    "Age of load reports",
                    "Reports come with every iteration; an instance that falls silent is used last.",
                    (Query(by(select(m.ROUTER_REPORT_AGE), "instance_id", how="max"), "{{instance_id}}"),),
                    "s",
                    thresholds=((2.0, "orange"), (10.0, "red")),
                ),
                Panel(
                    "Dispatches",
                    "Requests sent to instances per second, migrations included.",
                    (Query(by(rate(m.ROUTER_DISPATCHES), "model"), "{{model}}"),),
                    "reqps",
                ),
                Panel(
                    "Requests at the ingress",
                    "HTTP requests that have not ended, and of them those that wait because no instance can take them.",
                    (
                        Query(by(select(m.INGRESS_IN_FLIGHT), "model"), "{{model}} in flight"),
                        Query(by(select(m.INGRESS_WAITING), "model"), "{{model}} waiting"),
                    ),
                    "short",
                ),
                Panel(
                    "Outputs dropped",
                    "Outputs of attempts that were over, per second: late news from an instance given up.",
                    (Query(by(rate(m.STALE_OUTPUTS), "model"), "{{model}}"),),
                    "ops",
                ),
            ),
        ),
        Row(
            "Instances by themselves",
            (
                Panel(
                    "Running and waiting",
                    "Requests that hold KV, and requests that wait for it.",
                    (
                        Query(by(select(m.INSTANCE_RUNNING), "replica", how="max"), "{{replica}} running"),
                        Query(by(select(m.INSTANCE_WAITING), "replica", how="max"), "{{replica}} waiting"),
                    ),
                    "short",
                    width=6,
                ),
                Panel(
                    "Prefill capacity",
                    "Prompt tokens per second that an instance can prefill beside its decodes, by its latency model.",
                    (Query(by(select(m.INSTANCE_CAPACITY), "replica", how="max"), "{{replica}}"),),
                    "short",
                    width=6,
                ),
                Panel(
                    "Ended requests",
                    "Requests that ran to their end and requests dropped before, per second.",
                    (
                        Query(by(rate(m.FINISHED), "replica"), "{{replica}} finished"),
                        Query(by(rate(m.ABORTED), "replica"), "{{replica}} aborted"),
                    ),
                    "reqps",
                    width=6,
                ),
                Panel(
                    "Draining",
                    "1 while an instance takes no new requests.",
                    (Query(by(select(m.INSTANCE_DRAINING), "replica", how="max"), "{{replica}}"),),
                    "short",
                    width=6,
                    most=1,
                ),
            ),
        ),
    ),
)
