"""Declare the dashboards: the first row of each shows current problems, the rows below show their causes."""

from deploy.grafana.panels import Dashboard, Panel, Row, Variable, graph, stat, table

_MINUTE, _HOUR, _DAY = 60, 3_600, 86_400
_RATE = "[$__rate_interval]"
_ASKED = 'route!~"/actuator/.*|/healthz|/readyz|/metrics"'  # health checks return 503 on purpose
_FAILED = """max by (stage) (penstock_tracking_rows{@,status="failed"})
  - min by (stage) (min_over_time(penstock_tracking_rows{@,status="failed"}[6h]))"""
OVERVIEW, TRACKING, WAY_IN, PODS = "penstock-overview", "penstock-tracking", "penstock-refdata-in", "penstock-pods"
INGEST, HARVEST, FLOWS = "penstock-ingest", "penstock-harvest", "penstock-flows"
_DICTIONARY = Variable("dict_code", "Dictionary", "penstock_refdata_items")
_OF_DICTIONARY = '{@,dict_code=~"$dict_code"'


def _late(part: str, about: str, expr: str, to: str, warn: float, bad: float) -> Panel:
    return stat(f"{part}: late", about, expr, "s", warn=warn, bad=bad, to=to)


def _broken(part: str, about: str, expr: str, to: str, bad: float = 1) -> Panel:
    return stat(f"{part}: broken", about, expr, bad=bad, to=to)


_PLATFORM = Dashboard(
    OVERVIEW,
    "Penstock: overview",
    "Current problems by part, and the state of the processes. Start here.",
    [
        Row(
            "Now",
            [
                stat(
                    "Alerts firing",
                    "Number of firing Penstock alerts. Bad: more than 0. The table below lists them; each alert "
                    "has a page in the runbook.",
                    'count(ALERTS{alertstate="firing",alertname=~"Penstock.*"}) or vector(0)',
                    bad=1,
                ),
                stat(
                    "Processes down",
                    "Processes that Prometheus cannot scrape. Bad: more than 0.",
                    "count(up{@} == 0) or vector(0)",
                    bad=1,
                ),
                stat(
                    "Processes not ready",
                    "Processes that answer but accept no requests: starting, draining, or missing a dependency. "
                    "Bad: more than 0 for longer than a start takes.",
                    "count(penstock_ready{@} == 0) or vector(0)",
                    warn=1,
                    bad=2,
                ),
                stat(
                    "Dependencies down",
                    "Databases, message buses, signals and object stores that a process cannot reach. Bad: more "
                    "than 0.",
                    "count(penstock_component_up{@} == 0) or vector(0)",
                    bad=1,
                ),
                stat(
                    "Invalid configurations",
                    "Processes whose configuration file on disk is invalid. They keep the previous "
                    "configuration until a restart. Bad: more than 0.",
                    "sum(penstock_config_invalid{@}) or vector(0)",
                    bad=1,
                ),
                stat(
                    "Failed requests",
                    "Share of API responses with status 5xx. Bad: more than 0.1 %.",
                    f'(sum(rate(penstock_http_requests_total{{@,{_ASKED},status=~"5.."}}{_RATE})) or vector(0)) / '
                    f"(sum(rate(penstock_http_requests_total{{@,{_ASKED}}}{_RATE})) > 0) or vector(0)",
                    "percentunit",
                    warn=0.001,
                    bad=0.01,
                ),
            ],
        ),
        Row(
            "Late: age of the oldest waiting item by part",
            [
                _late(
                    "Tracking",
                    "Age of the oldest row that no worker has claimed. Bad: minutes, and growing.",
                    "max(penstock_tracking_queue_oldest_seconds{@})",
                    TRACKING,
                    15 * _MINUTE,
                    _HOUR,
                ),
                _late(
                    "Refdata writes",
                    "Age of the oldest pending update. Bad: more than seconds.",
                    "max(penstock_refdata_pending_oldest_seconds{@})",
                    WAY_IN,
                    _MINUTE,
                    15 * _MINUTE,
                ),
                _late(
                    "Pods",
                    "Longest time since a pod was in sync with the primary. Bad: more than 0; reads can be that old.",
                    "max(penstock_refdata_data_age_seconds{@})",
                    PODS,
                    10,
                    _MINUTE,
                ),
                _late(
                    "Ingest",
                    "Age of the oldest published supplier state. Bad: older than the interval of its deliveries.",
                    "max(penstock_ingest_state_age_seconds{@})",
                    INGEST,
                    _DAY,
                    2 * _DAY,
                ),
                _late(
                    "Harvest",
                    "Age of the oldest watermark of all feeds. Bad: more than a few intervals of the feed. "
                    "Empty until a run has completed since the start of the workers.",
                    "time() - min(max by (feed) (penstock_harvest_watermark_seconds{@}))",
                    HARVEST,
                    _HOUR,
                    6 * _HOUR,
                ),
                _late(
                    "Flows",
                    "Age of the oldest step that no worker has claimed. Bad: minutes, and growing.",
                    "max(penstock_flow_oldest_ready_step_seconds{@}) or vector(0)",
                    FLOWS,
                    5 * _MINUTE,
                    15 * _MINUTE,
                ),
            ],
        ),
        Row(
            "Broken: failures that need an operator, by part",
            [
                _broken(
                    "Tracking",
                    "Rows that failed permanently in the last 6 hours. Bad: more than 0.",
                    f"sum({_FAILED})",
                    TRACKING,
                ),
                _broken(
                    "Refdata writes",
                    "Commands that were rejected in the last hour. Bad: many at once.",
                    'sum(increase(penstock_refdata_events_total{@,result="failed"}[1h]))',
                    WAY_IN,
                    bad=10,
                ),
                _broken(
                    "Pods",
                    "Dictionaries that are behind the committed version on at least one pod. Bad: more than 0 "
                    "for longer than a load takes.",
                    "count(max by (dict_code) (dict_version_lag{@}) > 0) or vector(0)",
                    PODS,
                ),
                _broken(
                    "Ingest",
                    "Suppliers with an alert. Bad: more than 0.",
                    "count(max by (supplier) (penstock_ingest_alert{@}) > 0) or vector(0)",
                    INGEST,
                ),
                _broken(
                    "Harvest",
                    "Partitions that failed in the last hour. Bad: more than 0.",
                    'sum(increase(penstock_harvest_partitions_total{@,status="failed"}[1h])) or vector(0)',
                    HARVEST,
                ),
                _broken(
                    "Flows",
                    "Steps that failed in the last hour. Bad: more than usual for these flows.",
                    'sum(increase(penstock_flow_steps_total{@,outcome="FAILED"}[1h])) or vector(0)',
                    FLOWS,
                ),
            ],
        ),
        Row(
            "Alerts",
            [
                table(
                    "Firing alerts",
                    "Every firing Penstock alert with its labels. Bad: any row. The name of the alert is the "
                    "name of its runbook page.",
                    'ALERTS{alertstate="firing",alertname=~"Penstock.*"}',
                    empty="none",
                )
            ],
        ),
        Row(
            "Processes",
            [
                graph(
                    "Readiness",
                    "1 while a process accepts requests. Bad: gaps (the process is down) and 0 (the process "
                    "runs but cannot serve).",
                    ("penstock_ready{@}", "{{role}} {{instance}}"),
                ),
                graph(
                    "Dependencies",
                    "1 while a process reaches the dependency. Bad: 0. If all processes show 0, the dependency "
                    "is down; if one does, check this process and its network.",
                    ("min by (component, role) (penstock_component_up{@})", "{{component}} of {{role}}"),
                ),
                graph(
                    "CPU",
                    "CPU cores used by each process. Bad: a worker or an API process that stays at 1; add "
                    "another process.",
                    (f"rate(process_cpu_seconds_total{{@}}{_RATE})", "{{role}} {{instance}}"),
                ),
                graph(
                    "Memory",
                    "Resident memory of each process. Bad: steady growth, or a sawtooth, which means that the "
                    "process is killed and restarted.",
                    ("process_resident_memory_bytes{@}", "{{role}} {{instance}}"),
                    unit="bytes",
                ),
                graph(
                    "File descriptors",
                    "Share of the file descriptor limit in use. Bad: close to 100 %; the process then accepts "
                    "no connections.",
                    ("process_open_fds{@} / process_max_fds{@}", "{{role}} {{instance}}"),
                    unit="percentunit",
                    bad=0.8,
                ),
                graph(
                    "Releases",
                    "Processes by release. Bad: two releases for longer than a rollout takes.",
                    ("count by (version, commit) (penstock_build_info{@})", "{{version}} {{commit}}"),
                ),
            ],
        ),
        Row(
            "Requests of the API",
            [
                graph(
                    "Requests",
                    "API responses per second by status. Bad: any 5xx; 429 and 503 if callers exceed the limits.",
                    (f"sum by (status) (rate(penstock_http_requests_total{{@,{_ASKED}}}{_RATE}))", "{{status}}"),
                    unit="reqps",
                ),
                graph(
                    "Latency, p99",
                    "99th percentile of the response time by route. Bad: a route that became slower; streams "
                    "and waiting claims are slow by design.",
                    (
                        "histogram_quantile(0.99, sum by (le, method, route) "
                        f"(rate(penstock_http_request_seconds_bucket{{@,{_ASKED}}}{_RATE})))",
                        "{{method}} {{route}}",
                    ),
                    unit="s",
                ),
            ],
        ),
        Row(
            "Workers",
            [
                graph(
                    "Dead letters",
                    "New dead letters in an hour by topic. Bad: more than 0; they are not retried automatically.",
                    ("sum by (topic) (increase(penstock_bus_dead_letters_total{@}[1h]))", "{{topic}}"),
                ),
                graph(
                    "Processed items",
                    "Items processed per second by queue and outcome. Bad: `retry` and `failed` with little "
                    "`done`; `superseded`, because leases expire during the work.",
                    (
                        f"sum by (queue, outcome) (rate(penstock_work_items_total{{@}}{_RATE}))",
                        "{{queue}} {{outcome}}",
                    ),
                    unit="ops",
                ),
                graph(
                    "Batch duration, p95",
                    "95th percentile of the processing time of a batch by queue. Bad: close to the lease (30 s "
                    "to 60 s); work is then repeated.",
                    (
                        "histogram_quantile(0.95, sum by (le, queue) "
                        f"(rate(penstock_work_batch_seconds_bucket{{@}}{_RATE})))",
                        "{{queue}}",
                    ),
                    unit="s",
                ),
            ],
        ),
    ],
)

_TRACKING = Dashboard(
    TRACKING,
    "Penstock: tracking",
    "Status of files and shards, queues of the stages, and waiting times.",
    [
        Row(
            "Now",
            [
                stat(
                    "Oldest waiting row",
                    "Age of the oldest waiting row of all stages. Bad: minutes, and growing: no worker claims, "
                    "or the stage is paused.",
                    "max(penstock_tracking_queue_oldest_seconds{@})",
                    "s",
                    width=6,
                    warn=15 * _MINUTE,
                    bad=_HOUR,
                ),
                stat(
                    "Paused stages",
                    "Stages that an operator paused; their rows are not handed out. Bad: a forgotten pause.",
                    "sum(max by (stage) (penstock_tracking_paused{@}))",
                    width=6,
                    warn=1,
                ),
                stat(
                    "Rows failed, last 6 hours",
                    "Rows that failed permanently; they stay failed until an operator retries them. Bad: more than 0.",
                    f"sum({_FAILED})",
                    width=6,
                    bad=1,
                ),
                stat(
                    "Leases expired, last hour",
                    "Leases of workers that crashed or froze while they owned rows. Bad: more than the number "
                    "of restarted workers.",
                    "sum(increase(penstock_tracking_lease_expiries_total{@}[1h]))",
                    width=6,
                    warn=1,
                    bad=20,
                ),
            ],
        ),
        Row(
            "Queues",
            [
                graph(
                    "Waiting rows",
                    "Waiting rows by stage. Bad: a stage whose queue grows while later stages are empty: too "
                    "few workers, or none.",
                    ("max by (stage) (penstock_tracking_queue_rows{@})", "{{stage}}"),
                ),
                graph(
                    "Oldest waiting row",
                    "Age of the oldest waiting row by stage. Bad: a line at 45 degrees: no row is claimed.",
                    ("max by (stage) (penstock_tracking_queue_oldest_seconds{@})", "{{stage}}"),
                    unit="s",
                    bad=_HOUR,
                ),
                graph(
                    "Active rows",
                    "Claimed rows by stage. Bad: 0 while rows are waiting, or a number that never decreases.",
                    ('max by (stage) (penstock_tracking_rows{@,status="started"})', "{{stage}}"),
                ),
                graph(
                    "Failed rows",
                    "Failed rows by stage. Bad: steps upwards; `penstock track why` explains the cause.",
                    ('max by (stage) (penstock_tracking_rows{@,status="failed"})', "{{stage}}"),
                ),
                graph(
                    "Finished rows",
                    "Rows finished per hour by stage. Bad: 0 while rows are waiting.",
                    ('deriv(max by (stage) (penstock_tracking_rows{@,status="done"})[15m:1m]) * 3600', "{{stage}}"),
                ),
                graph(
                    "Expired leases",
                    "Expired leases per second by stage. Bad: a persistent rate; work is repeated.",
                    (f"sum by (stage) (rate(penstock_tracking_lease_expiries_total{{@}}{_RATE}))", "{{stage}}"),
                    unit="ops",
                ),
                graph(
                    "Paused",
                    "1 while a stage is paused. Bad: a forgotten pause.",
                    ("max by (stage) (penstock_tracking_paused{@})", "{{stage}}"),
                ),
            ],
        ),
    ],
)

_WAY_IN = Dashboard(
    WAY_IN,
    "Penstock: refdata writes",
    "Changes of dictionaries, from the request to the commit and its announcement.",
    [
        Row(
            "Now",
            [
                stat(
                    "Oldest pending update",
                    "Time since the oldest pending update was sent. Bad: more than seconds: apply is down, "
                    "blocked or overloaded.",
                    "max(penstock_refdata_pending_oldest_seconds{@})",
                    "s",
                    width=6,
                    warn=_MINUTE,
                    bad=15 * _MINUTE,
                ),
                stat(
                    "Unannounced commits",
                    "Committed versions that the relay has not announced to the pods. Bad: a persistent number: "
                    "the relay or the signals are down, and pods detect new versions only by polling.",
                    "max(penstock_refdata_outbox_messages{@})",
                    width=6,
                    warn=100,
                    bad=1000,
                ),
                stat(
                    "Message lag",
                    "Messages not processed yet, of the topic with the largest lag. Bad: growing.",
                    "max(kafka_consumer_lag{@})",
                    width=6,
                    warn=1000,
                    bad=10_000,
                ),
                stat(
                    "Drift, last day",
                    "Changes to the tables of a dictionary without a new version, made by other programs. Bad: "
                    "more than 0.",
                    "sum(increase(penstock_refdata_drifts_total{@}[1d])) or vector(0)",
                    width=6,
                    bad=1,
                ),
            ],
        ),
        Row(
            "Commands",
            [
                graph(
                    "Processed commands",
                    "Commands processed per second by result. Bad: `failed`, or no commands while messages are "
                    "waiting.",
                    (f"sum by (result) (rate(penstock_refdata_events_total{{@}}{_RATE}))", "{{result}}"),
                    unit="ops",
                ),
                graph(
                    "Message lag",
                    "Messages not processed yet by topic. Bad: a growing line: apply is too slow or not running.",
                    ("max by (topic) (kafka_consumer_lag{@})", "{{topic}}"),
                ),
                graph(
                    "Oldest pending update",
                    "Age of the oldest pending update. Bad: a line at 45 degrees: an update does not end.",
                    ("max(penstock_refdata_pending_oldest_seconds{@})", "oldest"),
                    unit="s",
                    bad=15 * _MINUTE,
                ),
                graph(
                    "Unannounced commits",
                    "Committed versions that are not announced. Bad: a persistent number above 0 while commits arrive.",
                    ("max(penstock_refdata_outbox_messages{@})", "waiting"),
                ),
                graph(
                    "Drift",
                    "Changes per hour to the tables of a dictionary without a new version. Bad: more than 0: "
                    "another program writes to the tables.",
                    ("sum by (dict_code) (increase(penstock_refdata_drifts_total{@}[1h]))", "{{dict_code}}"),
                ),
            ],
        ),
    ],
)

_PODS = Dashboard(
    PODS,
    "Penstock: query pods",
    "Loaded dictionaries, their freshness, and the answers that readers get.",
    [
        Row(
            "Now",
            [
                stat(
                    "Version lag",
                    "Largest number of versions that a pod is behind. Bad: more than 0 for longer than a load takes.",
                    f"max(dict_version_lag{_OF_DICTIONARY}}})",
                    warn=1,
                    bad=10,
                ),
                stat(
                    "Data age",
                    "Longest time since a pod was in sync with the primary. Bad: more than 0; reads can be that old.",
                    "max(penstock_refdata_data_age_seconds{@})",
                    "s",
                    warn=10,
                    bad=_MINUTE,
                ),
                stat(
                    "5xx responses",
                    "Share of reads with status 5xx. Bad: more than 0.",
                    f'sum(rate(penstock_query_requests_total{{@,status="5xx"}}{_RATE})) / '
                    f"(sum(rate(penstock_query_requests_total{{@}}{_RATE})) > 0) or vector(0)",
                    "percentunit",
                    warn=0.001,
                    bad=0.01,
                ),
                stat(
                    "Failed loads, last hour",
                    "Loads of dictionaries that failed. Bad: more than a few: a dictionary cannot be loaded and "
                    "becomes stale.",
                    "sum(increase(cache_reload_errors_total{@}[1h])) or vector(0)",
                    warn=1,
                    bad=10,
                ),
                stat(
                    "Audit mismatches, last day",
                    "Audits that found different items in a pod and in the primary; the pod reloaded the "
                    "dictionary. Bad: more than 0.",
                    'sum(increase(penstock_refdata_audits_total{@,result="mismatch"}[1d])) or vector(0)',
                    bad=1,
                ),
                stat(
                    "History resets, last day",
                    "Pods that found a restored primary, which no longer has versions that were served. Bad: "
                    "more than 0, except after a planned restore.",
                    "sum(increase(penstock_refdata_history_resets_total{@}[1d])) or vector(0)",
                    bad=1,
                ),
            ],
        ),
        Row(
            "Freshness",
            [
                graph(
                    "Version lag",
                    "Number of versions behind the committed version by dictionary and pod. Bad: a line that "
                    "does not return to 0.",
                    (f"dict_version_lag{_OF_DICTIONARY}}}", "{{dict_code}} {{instance}}"),
                ),
                graph(
                    "Data age",
                    "Time since the last sync with the primary by pod. Bad: a line at 45 degrees. All pods: the "
                    "primary is down; one pod: check its network.",
                    ("penstock_refdata_data_age_seconds{@}", "{{instance}}"),
                    unit="s",
                ),
                graph(
                    "Load duration, p95",
                    "95th percentile of the time from the start of a load to the switch, by dictionary and "
                    "kind. Bad: `delta` above 0.1 s.",
                    (
                        "histogram_quantile(0.95, sum by (le, dict_code, kind) "
                        f"(rate(cache_reload_duration_seconds_bucket{_OF_DICTIONARY}}}{_RATE})))",
                        "{{dict_code}} {{kind}}",
                    ),
                    unit="s",
                ),
                graph(
                    "Freshness",
                    "Time from a commit to its availability in a pod by dictionary, p50, p95 and p99. Bad: p95 "
                    "above 0.3 s.",
                    *(
                        (
                            f"histogram_quantile({share}, sum by (le, dict_code) "
                            f"(rate(penstock_refdata_freshness_seconds_bucket{_OF_DICTIONARY}}}{_RATE})))",
                            f"{{{{dict_code}}}} {name}",
                        )
                        for share, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
                    ),
                    unit="s",
                    bad=0.3,
                ),
                graph(
                    "Loads",
                    "Loads per second by dictionary and kind. Bad: repeated `full` loads although changes are deltas.",
                    (
                        "sum by (dict_code, kind) "
                        f"(rate(cache_reload_duration_seconds_count{_OF_DICTIONARY}}}{_RATE}))",
                        "{{dict_code}} {{kind}}",
                    ),
                    unit="ops",
                ),
                graph(
                    "Failed loads",
                    "Failed loads in five minutes by dictionary and error code. Bad: a persistent number.",
                    (
                        f"sum by (dict_code, code) (increase(cache_reload_errors_total{_OF_DICTIONARY}}}[5m]))",
                        "{{dict_code}} {{code}}",
                    ),
                ),
                graph(
                    "Invalidation lag",
                    "Invalidations in Redis that the slowest pod has not received. Bad: growing.",
                    ("max(redis_stream_lag{@})", "slowest pod"),
                ),
            ],
        ),
        Row(
            "Reads",
            [
                graph(
                    "Requests",
                    "Reads per second by status. Bad: 5xx; 409, which means that readers request versions that "
                    "were never committed.",
                    (f"sum by (status) (rate(penstock_query_requests_total{{@}}{_RATE}))", "{{status}}"),
                    unit="reqps",
                ),
                graph(
                    "Requests by pod",
                    "Reads per second by pod. Bad: one pod that gets all requests, or none.",
                    (f"sum by (instance) (rate(penstock_query_requests_total{{@}}{_RATE}))", "{{instance}}"),
                    unit="reqps",
                ),
                graph(
                    "Barrier waits and fallback reads",
                    "Reads per second that waited for a version or were answered by the primary. Bad: many: "
                    "pods are behind, and the primary serves the reads.",
                    (f"sum(rate(penstock_query_barrier_waits_total{{@}}{_RATE}))", "waited for a version"),
                    (
                        f"sum by (dict_code) (rate(postgres_fallback_reads_total{_OF_DICTIONARY}}}{_RATE}))",
                        "{{dict_code}} from the primary",
                    ),
                    unit="ops",
                ),
                graph(
                    "Connections",
                    "Open connections by pod. Bad: a steep fall (the pod is down), or a rise without more requests.",
                    ("penstock_query_connections{@}", "{{instance}}"),
                ),
            ],
        ),
        Row(
            "Loaded dictionaries",
            [
                graph(
                    "Items",
                    "Items by dictionary, of the pod with the fewest. Bad: an unexpected fall.",
                    (f"min by (dict_code) (penstock_refdata_items{_OF_DICTIONARY}}})", "{{dict_code}}"),
                ),
                graph(
                    "Dictionary memory",
                    "Share of `refdata.query.memoryLimitMb` in use by pod. Bad: close to 100 %; loads are then "
                    "refused.",
                    ("penstock_refdata_memory_bytes{@} / penstock_refdata_memory_limit_bytes{@}", "{{instance}}"),
                    unit="percentunit",
                    bad=0.8,
                ),
                graph(
                    "Audits",
                    "Audits per hour by result. Bad: `mismatch`; `failed` all the time, because nothing is compared.",
                    ("sum by (result) (increase(penstock_refdata_audits_total{@}[1h]))", "{{result}}"),
                ),
            ],
        ),
    ],
    [_DICTIONARY],
)

_OF_SUPPLIER = '{@,supplier=~"$supplier"'
_INGEST = Dashboard(
    INGEST,
    "Penstock: ingest",
    "Delivered files, published states, and rejected files by supplier.",
    [
        Row(
            "Now",
            [
                stat(
                    "Suppliers with an alert",
                    "Suppliers with an alert; the panels below show which and why. Bad: more than 0.",
                    "count(max by (supplier) (penstock_ingest_alert{@}) > 0) or vector(0)",
                    width=6,
                    bad=1,
                ),
                stat(
                    "Oldest published state",
                    "Age of the oldest published supplier state. Bad: older than the interval of the deliveries.",
                    "max(penstock_ingest_state_age_seconds{@})",
                    "s",
                    width=6,
                    warn=_DAY,
                    bad=2 * _DAY,
                ),
                stat(
                    "Waiting files",
                    "Files in all inboxes. Bad: a number that does not fall: the watcher is down, or runs fail.",
                    "sum(max by (supplier) (penstock_ingest_inbox_files{@}))",
                    width=6,
                    warn=10,
                    bad=50,
                ),
                stat(
                    "Files in quarantine",
                    "Rejected files that need a decision. Bad: a growing number.",
                    "sum(max by (supplier) (penstock_ingest_quarantined_files{@}))",
                    width=6,
                    warn=1,
                    bad=5,
                ),
            ],
        ),
        Row(
            "Suppliers",
            [
                graph(
                    "Alerts",
                    "1 while an alert of a supplier is active. Bad: any line.",
                    (f"max by (supplier, alert) (penstock_ingest_alert{_OF_SUPPLIER}}}) > 0", "{{supplier}} {{alert}}"),
                    empty="none",
                ),
                graph(
                    "Age of the published state",
                    "Age of the published state by supplier. Good: a sawtooth with the interval of the "
                    "deliveries. Bad: a line that only rises.",
                    (f"max by (supplier) (penstock_ingest_state_age_seconds{_OF_SUPPLIER}}})", "{{supplier}}"),
                    unit="s",
                    bad=2 * _DAY,
                ),
                graph(
                    "Published facts",
                    "Published facts by supplier. Bad: an unexpected step downwards.",
                    (f"max by (supplier) (penstock_ingest_state_facts{_OF_SUPPLIER}}})", "{{supplier}}"),
                ),
                graph(
                    "Waiting files",
                    "Files in the inbox by supplier. Bad: a number that does not fall.",
                    (f"max by (supplier) (penstock_ingest_inbox_files{_OF_SUPPLIER}}})", "{{supplier}}"),
                ),
                graph(
                    "Files in quarantine",
                    "Files in quarantine by supplier. Bad: steps upwards.",
                    (f"max by (supplier) (penstock_ingest_quarantined_files{_OF_SUPPLIER}}})", "{{supplier}}"),
                ),
                graph(
                    "Consecutive failures and unchanged files",
                    "Consecutive failed runs and consecutive identical files by supplier. Bad: more than 2 "
                    "failures; more than 4 identical files: the export of the supplier has stalled.",
                    (
                        f"max by (supplier) (penstock_ingest_consecutive_failures{_OF_SUPPLIER}}})",
                        "{{supplier}} failures",
                    ),
                    (f"max by (supplier) (penstock_ingest_unchanged_files{_OF_SUPPLIER}}})", "{{supplier}} same file"),
                ),
            ],
        ),
        Row(
            "Runs",
            [
                graph(
                    "Runs",
                    "Runs that ended in an hour by supplier and status. Bad: FAIL.",
                    (
                        f"sum by (supplier, status) (increase(penstock_ingest_runs_total{_OF_SUPPLIER}}}[1h]))",
                        "{{supplier}} {{status}}",
                    ),
                ),
                graph(
                    "Failed runs by reason",
                    "Failed runs in an hour by reason code. Bad: any line; docs/etl/reason_codes.yaml explains "
                    "each code.",
                    (
                        f'sum by (code) (increase(penstock_ingest_runs_total{_OF_SUPPLIER},status="FAIL"}}[1h]))',
                        "{{code}}",
                    ),
                ),
            ],
        ),
    ],
    [Variable("supplier", "Supplier", "penstock_ingest_inbox_files")],
    since="now-2d",
    refresh="1m",
)

_OF_FEED = '{@,feed=~"$feed"'
_HARVEST = Dashboard(
    HARVEST,
    "Penstock: harvest",
    "Watermarks of feeds, progress of runs, and failures.",
    [
        Row(
            "Now",
            [
                stat(
                    "Oldest watermark",
                    "Age of the oldest watermark of all feeds. Bad: more than a few intervals of the feed. "
                    "Empty until a run has completed since the start of the workers.",
                    f"time() - min(max by (feed) (penstock_harvest_watermark_seconds{_OF_FEED}}}))",
                    "s",
                    width=6,
                    warn=_HOUR,
                    bad=6 * _HOUR,
                ),
                stat(
                    "Partitions failed, last hour",
                    "Partitions that failed permanently; their runs do not complete without an operator. Bad: "
                    "more than 0.",
                    f'sum(increase(penstock_harvest_partitions_total{_OF_FEED},status="failed"}}[1h])) or vector(0)',
                    width=6,
                    bad=1,
                ),
                stat(
                    "Undelivered alerts",
                    "Alerts that the mail server or the webhook did not accept. Bad: more than 0.",
                    "max(penstock_harvest_alerts_undelivered{@})",
                    width=6,
                    bad=1,
                ),
                stat(
                    "Runs completed, last day",
                    "Completed runs. Bad: fewer than the schedule requires.",
                    f"sum(increase(penstock_harvest_runs_completed_total{_OF_FEED}}}[1d]))",
                    width=6,
                    good_from=1,
                ),
            ],
        ),
        Row(
            "Feeds",
            [
                graph(
                    "Age of the watermark",
                    "Age of the watermark by feed. Good: a sawtooth. Bad: a line that only rises.",
                    (f"time() - max by (feed) (penstock_harvest_watermark_seconds{_OF_FEED}}})", "{{feed}}"),
                    unit="s",
                    bad=6 * _HOUR,
                ),
                graph(
                    "Age of the watermark in intervals",
                    "Age of the watermark divided by the interval of the feed, for feeds with a schedule. Bad: "
                    "above 3.",
                    (
                        f"(time() - max by (feed) (penstock_harvest_watermark_seconds{_OF_FEED}}}))"
                        f" / on (feed) max by (feed) (penstock_harvest_interval_seconds{_OF_FEED}}})",
                        "{{feed}}",
                    ),
                    bad=3,
                ),
                graph(
                    "Completed runs",
                    "Completed runs per day by feed and type. Bad: no `full` run for longer than `full_every`; "
                    "deleted records then stay published.",
                    (
                        f"sum by (feed, type) (increase(penstock_harvest_runs_completed_total{_OF_FEED}}}[1d]))",
                        "{{feed}} {{type}}",
                    ),
                ),
                graph(
                    "Failures by code",
                    "Failures in five minutes by feed and error code. Bad: a persistent line: the source "
                    "throttles, returns wrong data or is down.",
                    (
                        f"sum by (feed, code) (increase(penstock_harvest_failures_total{_OF_FEED}}}[5m]))",
                        "{{feed}} {{code}}",
                    ),
                ),
                graph(
                    "Partitions",
                    "Partitions that ended in an hour by feed and status. Bad: `failed`.",
                    (
                        f"sum by (feed, status) (increase(penstock_harvest_partitions_total{_OF_FEED}}}[1h]))",
                        "{{feed}} {{status}}",
                    ),
                ),
            ],
        ),
        Row(
            "Records",
            [
                graph(
                    "Pages",
                    "Pages fetched per second by feed. Bad: 0 while a run is active.",
                    (f"sum by (feed) (rate(penstock_harvest_pages_total{_OF_FEED}}}{_RATE}))", "{{feed}}"),
                    unit="ops",
                ),
                graph(
                    "Records",
                    "Records fetched and consolidated per second by feed. Bad: records are fetched and never "
                    "consolidated.",
                    (f"sum by (feed) (rate(penstock_harvest_records_total{_OF_FEED}}}{_RATE}))", "{{feed}} fetched"),
                    (
                        f"sum by (feed) (rate(penstock_harvest_consolidated_records_total{_OF_FEED}}}{_RATE}))",
                        "{{feed}} canonical",
                    ),
                    unit="ops",
                ),
                graph(
                    "Rejected records",
                    "Share of rejected records by feed. Bad: close to `limits.max_reject_ratio`, at which a run fails.",
                    (
                        f"sum by (feed) (rate(penstock_harvest_rejects_total{_OF_FEED}}}{_RATE})) / "
                        f"(sum by (feed) (rate(penstock_harvest_records_total{_OF_FEED}}}{_RATE})) > 0)",
                        "{{feed}}",
                    ),
                    unit="percentunit",
                ),
            ],
        ),
    ],
    [Variable("feed", "Feed", "penstock_harvest_records_total")],
    since="now-1d",
    refresh="1m",
)

_OF_KIND = '{@,kind=~"$kind"'
_FLOWS = Dashboard(
    FLOWS,
    "Penstock: flows",
    "Active runs, steps that wait for workers, and outcomes of steps.",
    [
        Row(
            "Now",
            [
                stat(
                    "Oldest waiting step",
                    "Age of the oldest ready step of all kinds. Bad: minutes, and growing: no worker for the "
                    "kind, or a limit is reached.",
                    "max(penstock_flow_oldest_ready_step_seconds{@}) or vector(0)",
                    "s",
                    width=6,
                    warn=5 * _MINUTE,
                    bad=15 * _MINUTE,
                ),
                stat(
                    "Failed steps, last hour",
                    "Failed attempts of Penstock's own workers. Bad: more than usual.",
                    'sum(increase(penstock_flow_steps_total{@,outcome="FAILED"}[1h])) or vector(0)',
                    width=6,
                    warn=1,
                    bad=20,
                ),
                stat(
                    "Active runs",
                    "Runs that have not ended. Bad: a number that only grows: runs start and do not end.",
                    "sum(max by (status) (penstock_flow_runs_active{@})) or vector(0)",
                    width=6,
                    warn=1000,
                ),
                stat(
                    "Repaired runs, last day",
                    "Runs whose counters were inconsistent after a crash and were repaired. Bad: many: "
                    "processes crash.",
                    "sum(increase(penstock_flow_runs_repaired_total{@}[1d]))",
                    width=6,
                    warn=1,
                    bad=20,
                ),
            ],
        ),
        Row(
            "Waiting",
            [
                graph(
                    "Waiting steps",
                    "Ready steps by kind. Bad: a kind whose queue grows: too few workers, or none.",
                    (f"max by (kind) (penstock_flow_steps_ready{_OF_KIND}}})", "{{kind}}"),
                ),
                graph(
                    "Oldest waiting step",
                    "Age of the oldest ready step by kind. Bad: a line at 45 degrees: no step of this kind is claimed.",
                    (f"max by (kind) (penstock_flow_oldest_ready_step_seconds{_OF_KIND}}})", "{{kind}}"),
                    unit="s",
                    bad=15 * _MINUTE,
                ),
                graph(
                    "Active runs",
                    "Active runs by status. Bad: a line that only rises.",
                    ("max by (status) (penstock_flow_runs_active{@})", "{{status}}"),
                ),
                graph(
                    "Repaired runs",
                    "Repaired runs per hour. Bad: a persistent number.",
                    ("sum(increase(penstock_flow_runs_repaired_total{@}[1h]))", "repaired"),
                ),
            ],
        ),
        Row(
            "Steps of Penstock's own workers",
            [
                graph(
                    "Steps",
                    "Steps that ended per second by kind and outcome. Bad: FAILED; RELEASED, because workers "
                    "start and stop repeatedly.",
                    (
                        f"sum by (kind, outcome) (rate(penstock_flow_steps_total{_OF_KIND}}}{_RATE}))",
                        "{{kind}} {{outcome}}",
                    ),
                    unit="ops",
                ),
                graph(
                    "Step duration, p95",
                    "95th percentile of the duration of a step by kind. Bad: a kind that became slower.",
                    (
                        "histogram_quantile(0.95, sum by (le, kind) "
                        f"(rate(penstock_flow_step_seconds_bucket{_OF_KIND}}}{_RATE})))",
                        "{{kind}}",
                    ),
                    unit="s",
                ),
            ],
        ),
    ],
    [Variable("kind", "Kind", "penstock_flow_steps_total")],
)

DASHBOARDS = (_PLATFORM, _TRACKING, _WAY_IN, _PODS, _INGEST, _HARVEST, _FLOWS)
