"""The dashboards: in each, the first row tells whether anything is wrong now, those below tell why."""

from deploy.grafana.panels import Dashboard, Panel, Row, Variable, graph, stat, table

_MINUTE, _HOUR, _DAY = 60, 3_600, 86_400
_RATE = "[$__rate_interval]"
_ASKED = 'route!~"/actuator/.*|/healthz|/readyz|/metrics"'  # health says 503 on purpose
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
    "Whether anything is wrong now, in which part, and how the processes do. Begin here.",
    [
        Row(
            "Now",
            [
                stat(
                    "Alerts firing",
                    "Bad: anything but 0. The table below names them; each has its page in the runbook.",
                    'count(ALERTS{alertstate="firing",alertname=~"Penstock.*"}) or vector(0)',
                    bad=1,
                ),
                stat(
                    "Processes down",
                    "Processes Prometheus cannot reach. Bad: anything but 0.",
                    "count(up{@} == 0) or vector(0)",
                    bad=1,
                ),
                stat(
                    "Processes not ready",
                    "Reached, but they take no requests: starting, draining, or without what they need. Bad: more than "
                    "0 for longer than a start takes.",
                    "count(penstock_ready{@} == 0) or vector(0)",
                    warn=1,
                    bad=2,
                ),
                stat(
                    "Dependencies down",
                    "Databases, buses, signals, stores that a process cannot reach. Bad: anything but 0.",
                    "count(penstock_component_up{@} == 0) or vector(0)",
                    bad=1,
                ),
                stat(
                    "Configurations refused",
                    "Processes whose file on disk is wrong; they go on with the one before, until they are restarted. "
                    "Bad: anything but 0.",
                    "sum(penstock_config_invalid{@}) or vector(0)",
                    bad=1,
                ),
                stat(
                    "Requests that failed",
                    "Share of the API's answers that are 5xx. Bad: more than 0.1 %.",
                    f'(sum(rate(penstock_http_requests_total{{@,{_ASKED},status=~"5.."}}{_RATE})) or vector(0)) / '
                    f"(sum(rate(penstock_http_requests_total{{@,{_ASKED}}}{_RATE})) > 0) or vector(0)",
                    "percentunit",
                    warn=0.001,
                    bad=0.01,
                ),
            ],
        ),
        Row(
            "Late: how long the oldest waits, part by part",
            [
                _late(
                    "Tracking",
                    "Age of the oldest row no worker has taken. Bad: minutes, and growing.",
                    "max(penstock_tracking_queue_oldest_seconds{@})",
                    TRACKING,
                    15 * _MINUTE,
                    _HOUR,
                ),
                _late(
                    "Refdata in",
                    "Age of the oldest update under way. Bad: more than seconds.",
                    "max(penstock_refdata_pending_oldest_seconds{@})",
                    WAY_IN,
                    _MINUTE,
                    15 * _MINUTE,
                ),
                _late(
                    "Pods",
                    "How long ago the pod that is worst off saw the primary. Bad: anything but 0; reads are that old.",
                    "max(penstock_refdata_data_age_seconds{@})",
                    PODS,
                    10,
                    _MINUTE,
                ),
                _late(
                    "Ingest",
                    "Age of the oldest supplier's published state. Bad: older than its deliveries are apart.",
                    "max(penstock_ingest_state_age_seconds{@})",
                    INGEST,
                    _DAY,
                    2 * _DAY,
                ),
                _late(
                    "Harvest",
                    "How far the feed that is furthest behind is known. Bad: more than a few of its intervals. "
                    "Empty until a run has completed since the workers started.",
                    "time() - min(max by (feed) (penstock_harvest_watermark_seconds{@}))",
                    HARVEST,
                    _HOUR,
                    6 * _HOUR,
                ),
                _late(
                    "Flows",
                    "Age of the oldest step no worker has taken. Bad: minutes, and growing.",
                    "max(penstock_flow_oldest_ready_step_seconds{@}) or vector(0)",
                    FLOWS,
                    5 * _MINUTE,
                    15 * _MINUTE,
                ),
            ],
        ),
        Row(
            "Broken: what somebody has to look at, part by part",
            [
                _broken(
                    "Tracking",
                    "Rows that failed for good in the last 6 hours. Bad: anything but 0.",
                    f"sum({_FAILED})",
                    TRACKING,
                ),
                _broken(
                    "Refdata in",
                    "Commands that failed in the last hour: callers were refused. Bad: many at once.",
                    'sum(increase(penstock_refdata_events_total{@,result="failed"}[1h]))',
                    WAY_IN,
                    bad=10,
                ),
                _broken(
                    "Pods",
                    "Dictionaries some pod is behind with. Bad: more than 0 for longer than a load takes.",
                    "count(max by (dict_code) (dict_version_lag{@}) > 0) or vector(0)",
                    PODS,
                ),
                _broken(
                    "Ingest",
                    "Suppliers with an alert. Bad: anything but 0.",
                    "count(max by (supplier) (penstock_ingest_alert{@}) > 0) or vector(0)",
                    INGEST,
                ),
                _broken(
                    "Harvest",
                    "Partitions that failed in the last hour. Bad: anything but 0.",
                    'sum(increase(penstock_harvest_partitions_total{@,status="failed"}[1h])) or vector(0)',
                    HARVEST,
                ),
                _broken(
                    "Flows",
                    "Steps that failed in the last hour. Bad: more than is usual for these flows.",
                    'sum(increase(penstock_flow_steps_total{@,outcome="FAILED"}[1h])) or vector(0)',
                    FLOWS,
                ),
            ],
        ),
        Row(
            "Alerts",
            [
                table(
                    "Firing",
                    "Every alert of ours that fires, with what it is about. Bad: any line. Its name is the heading in "
                    "the runbook.",
                    'ALERTS{alertstate="firing",alertname=~"Penstock.*"}',
                    empty="none",
                )
            ],
        ),
        Row(
            "Processes",
            [
                graph(
                    "Ready",
                    "1 while a process takes requests. Bad: gaps (it is gone) and 0 (it is there and cannot serve).",
                    ("penstock_ready{@}", "{{role}} {{instance}}"),
                ),
                graph(
                    "Dependencies",
                    "1 while a process reaches what it depends on. Bad: 0; when all processes show it, the dependency "
                    "is down, when one does, it is that process or its network.",
                    ("min by (component, role) (penstock_component_up{@})", "{{component}} of {{role}}"),
                ),
                graph(
                    "Processor",
                    "Cores each process uses. Bad: a worker or an API that stays at 1: it can do no more, add another.",
                    (f"rate(process_cpu_seconds_total{{@}}{_RATE})", "{{role}} {{instance}}"),
                ),
                graph(
                    "Memory",
                    "What each process holds in memory. Bad: growth without end, or a saw: it is killed and restarted.",
                    ("process_resident_memory_bytes{@}", "{{role}} {{instance}}"),
                    unit="bytes",
                ),
                graph(
                    "File descriptors",
                    "Share of those it may have. Bad: towards 100 %; at that it takes no connections.",
                    ("process_open_fds{@} / process_max_fds{@}", "{{role}} {{instance}}"),
                    unit="percentunit",
                    bad=0.8,
                ),
                graph(
                    "Releases",
                    "Processes by release. Bad: two of them for longer than a roll-out takes.",
                    ("count by (version, commit) (penstock_build_info{@})", "{{version}} {{commit}}"),
                ),
            ],
        ),
        Row(
            "Requests of the API",
            [
                graph(
                    "Requests",
                    "Answers a second by status. Bad: 5xx at all; 429 and 503 when callers come too fast.",
                    (f"sum by (status) (rate(penstock_http_requests_total{{@,{_ASKED}}}{_RATE}))", "{{status}}"),
                    unit="reqps",
                ),
                graph(
                    "Time to answer, 99 of 100",
                    "By route. Bad: a route that was quick and is not; streams and waiting claims are slow by nature.",
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
            "Work loops",
            [
                graph(
                    "Messages set aside",
                    "In an hour, by topic. Bad: any: nobody tries them again.",
                    ("sum by (topic) (increase(penstock_bus_dead_letters_total{@}[1h]))", "{{topic}}"),
                ),
                graph(
                    "Items",
                    "Items handled a second by queue and outcome. Bad: `retry` and `failed` beside little `done`; "
                    "`superseded`: leases run out under their workers.",
                    (
                        f"sum by (queue, outcome) (rate(penstock_work_items_total{{@}}{_RATE}))",
                        "{{queue}} {{outcome}}",
                    ),
                    unit="ops",
                ),
                graph(
                    "Time for a batch, 95 of 100",
                    "By queue. Bad: near the lease (30 s to 60 s): work is done twice.",
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
    "Where files and shards stand, what waits for whom, and for how long.",
    [
        Row(
            "Now",
            [
                stat(
                    "Oldest row waits",
                    "Of all stages. Bad: minutes, and growing: nobody claims, or the stage is paused.",
                    "max(penstock_tracking_queue_oldest_seconds{@})",
                    "s",
                    width=6,
                    warn=15 * _MINUTE,
                    bad=_HOUR,
                ),
                stat(
                    "Stages paused",
                    "Somebody paused them, and nothing is handed out. Bad: when nobody knows why.",
                    "sum(max by (stage) (penstock_tracking_paused{@}))",
                    width=6,
                    warn=1,
                ),
                stat(
                    "Rows failed, last 6 hours",
                    "They stay so until somebody retries them. Bad: anything but 0.",
                    f"sum({_FAILED})",
                    width=6,
                    bad=1,
                ),
                stat(
                    "Leases run out, last hour",
                    "Workers that died or froze with rows in hand. Bad: more than were restarted.",
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
                    "Rows that wait",
                    "By stage. Bad: one that grows while those after it are empty: its workers are too few or gone.",
                    ("max by (stage) (penstock_tracking_queue_rows{@})", "{{stage}}"),
                ),
                graph(
                    "Oldest row that waits",
                    "By stage. Bad: a line at 45 degrees: nothing is taken at all.",
                    ("max by (stage) (penstock_tracking_queue_oldest_seconds{@})", "{{stage}}"),
                    unit="s",
                    bad=_HOUR,
                ),
                graph(
                    "Rows under way",
                    "Claimed or begun, by stage. Bad: 0 while rows wait, or many that never become fewer.",
                    ('max by (stage) (penstock_tracking_rows{@,status="started"})', "{{stage}}"),
                ),
                graph(
                    "Rows failed",
                    "By stage. Bad: steps upwards; `penstock track why` tells why.",
                    ('max by (stage) (penstock_tracking_rows{@,status="failed"})', "{{stage}}"),
                ),
                graph(
                    "Rows done",
                    "How many more an hour, by stage. Bad: 0 while rows wait.",
                    ('deriv(max by (stage) (penstock_tracking_rows{@,status="done"})[15m:1m]) * 3600', "{{stage}}"),
                ),
                graph(
                    "Leases that ran out",
                    "A second, by stage. Bad: anything lasting; work is done again and again.",
                    (f"sum by (stage) (rate(penstock_tracking_lease_expiries_total{{@}}{_RATE}))", "{{stage}}"),
                    unit="ops",
                ),
                graph(
                    "Paused",
                    "1 while a stage is paused. Bad: when nobody knows why.",
                    ("max by (stage) (penstock_tracking_paused{@})", "{{stage}}"),
                ),
            ],
        ),
    ],
)

_WAY_IN = Dashboard(
    WAY_IN,
    "Penstock: refdata in",
    "Changes of dictionaries from the request to the commit and its announcement.",
    [
        Row(
            "Now",
            [
                stat(
                    "Oldest update under way",
                    "Since it was asked for. Bad: more than seconds: apply is down, stuck or overrun.",
                    "max(penstock_refdata_pending_oldest_seconds{@})",
                    "s",
                    width=6,
                    warn=_MINUTE,
                    bad=15 * _MINUTE,
                ),
                stat(
                    "Commits not announced",
                    "Versions the relay has yet to tell pods of. Bad: anything that stays: relay or signals are down, "
                    "and pods find new versions only by looking.",
                    "max(penstock_refdata_outbox_messages{@})",
                    width=6,
                    warn=100,
                    bad=1000,
                ),
                stat(
                    "Messages behind",
                    "Of the topic that is furthest behind. Bad: growing.",
                    "max(kafka_consumer_lag{@})",
                    width=6,
                    warn=1000,
                    bad=10_000,
                ),
                stat(
                    "Changes past us, last day",
                    "A dictionary's tables were changed by others, without a version. Bad: anything but 0.",
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
                    "Commands judged",
                    "A second, by what became of them. Bad: `failed` at all, or none while messages wait.",
                    (f"sum by (result) (rate(penstock_refdata_events_total{{@}}{_RATE}))", "{{result}}"),
                    unit="ops",
                ),
                graph(
                    "Messages behind",
                    "By topic. Bad: a line that grows: apply cannot keep up, or does not run.",
                    ("max by (topic) (kafka_consumer_lag{@})", "{{topic}}"),
                ),
                graph(
                    "Oldest update under way",
                    "Bad: a line at 45 degrees: one update is stuck.",
                    ("max(penstock_refdata_pending_oldest_seconds{@})", "oldest"),
                    unit="s",
                    bad=15 * _MINUTE,
                ),
                graph(
                    "Commits not announced",
                    "Bad: anything that stays above 0 while commits come.",
                    ("max(penstock_refdata_outbox_messages{@})", "waiting"),
                ),
                graph(
                    "Changes past us",
                    "In an hour, by dictionary. Bad: anything: somebody writes to its tables without a version.",
                    ("sum by (dict_code) (increase(penstock_refdata_drifts_total{@}[1h]))", "{{dict_code}}"),
                ),
            ],
        ),
    ],
)

_PODS = Dashboard(
    PODS,
    "Penstock: query pods",
    "What pods hold, how fresh it is, and what readers get.",
    [
        Row(
            "Now",
            [
                stat(
                    "Versions behind",
                    "Of the dictionary and pod that are worst off. Bad: more than 0 for longer than a load takes.",
                    f"max(dict_version_lag{_OF_DICTIONARY}}})",
                    warn=1,
                    bad=10,
                ),
                stat(
                    "Primary out of sight",
                    "Of the pod that is worst off. Bad: anything but 0: reads are as old as this says.",
                    "max(penstock_refdata_data_age_seconds{@})",
                    "s",
                    warn=10,
                    bad=_MINUTE,
                ),
                stat(
                    "Answers 5xx",
                    "Share of all. Bad: anything but 0.",
                    f'sum(rate(penstock_query_requests_total{{@,status="5xx"}}{_RATE})) / '
                    f"(sum(rate(penstock_query_requests_total{{@}}{_RATE})) > 0) or vector(0)",
                    "percentunit",
                    warn=0.001,
                    bad=0.01,
                ),
                stat(
                    "Loads failed, last hour",
                    "Bad: more than a few: a dictionary cannot be loaded, and grows old.",
                    "sum(increase(cache_reload_errors_total{@}[1h])) or vector(0)",
                    warn=1,
                    bad=10,
                ),
                stat(
                    "Audits that disagree, last day",
                    "A pod held what the primary did not; it was loaded anew. Bad: anything but 0.",
                    'sum(increase(penstock_refdata_audits_total{@,result="disagrees"}[1d])) or vector(0)',
                    bad=1,
                ),
                stat(
                    "Primaries with another past, last day",
                    "Pods met a primary restored from a backup: versions readers were told of are gone. Bad: anything "
                    "but 0 that nobody planned.",
                    "sum(increase(penstock_refdata_history_resets_total{@}[1d])) or vector(0)",
                    bad=1,
                ),
            ],
        ),
        Row(
            "Freshness",
            [
                graph(
                    "Versions behind",
                    "By dictionary and pod. Bad: a line that does not come back to 0.",
                    (f"dict_version_lag{_OF_DICTIONARY}}}", "{{dict_code}} {{instance}}"),
                ),
                graph(
                    "Primary out of sight",
                    "By pod. Bad: a line at 45 degrees; of all pods: the primary is down; of one: its network.",
                    ("penstock_refdata_data_age_seconds{@}", "{{instance}}"),
                    unit="s",
                ),
                graph(
                    "Time of a load, 95 of 100",
                    "From its beginning to the swap, by dictionary and kind. Bad: `delta` above 0.1 s.",
                    (
                        "histogram_quantile(0.95, sum by (le, dict_code, kind) "
                        f"(rate(cache_reload_duration_seconds_bucket{_OF_DICTIONARY}}}{_RATE})))",
                        "{{dict_code}} {{kind}}",
                    ),
                    unit="s",
                ),
                graph(
                    "From commit to pod",
                    "By dictionary, for 50, 95 and 99 of 100 changes. Bad: p95 above 0.3 s.",
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
                    "A second, by dictionary and kind. Bad: `full` again and again where changes are deltas.",
                    (
                        "sum by (dict_code, kind) "
                        f"(rate(cache_reload_duration_seconds_count{_OF_DICTIONARY}}}{_RATE}))",
                        "{{dict_code}} {{kind}}",
                    ),
                    unit="ops",
                ),
                graph(
                    "Loads that failed",
                    "In five minutes, by dictionary and reason. Bad: anything lasting.",
                    (
                        f"sum by (dict_code, code) (increase(cache_reload_errors_total{_OF_DICTIONARY}}}[5m]))",
                        "{{dict_code}} {{code}}",
                    ),
                ),
                graph(
                    "Invalidations behind",
                    "What the slowest pod has yet to be handed, with Redis. Bad: growing.",
                    ("max(redis_stream_lag{@})", "slowest pod"),
                ),
            ],
        ),
        Row(
            "Reads",
            [
                graph(
                    "Requests",
                    "A second, by status. Bad: 5xx; 409 when readers name versions that were never committed.",
                    (f"sum by (status) (rate(penstock_query_requests_total{{@}}{_RATE}))", "{{status}}"),
                    unit="reqps",
                ),
                graph(
                    "Requests by pod",
                    "A second. Bad: one pod with all of them, or with none.",
                    (f"sum by (instance) (rate(penstock_query_requests_total{{@}}{_RATE}))", "{{instance}}"),
                    unit="reqps",
                ),
                graph(
                    "Reads that waited or went to the primary",
                    "A second. Bad: many: pods are late, and the primary carries the reads.",
                    (f"sum(rate(penstock_query_barrier_waits_total{{@}}{_RATE}))", "named a version not held yet"),
                    (
                        f"sum by (dict_code) (rate(postgres_fallback_reads_total{_OF_DICTIONARY}}}{_RATE}))",
                        "{{dict_code}} from the primary",
                    ),
                    unit="ops",
                ),
                graph(
                    "Connections",
                    "Open, by pod. Bad: a steep fall (a pod is gone) or a rise without more requests.",
                    ("penstock_query_connections{@}", "{{instance}}"),
                ),
            ],
        ),
        Row(
            "Holdings",
            [
                graph(
                    "Items",
                    "By dictionary, of the pod that has fewest. Bad: a fall nobody asked for.",
                    (f"min by (dict_code) (penstock_refdata_items{_OF_DICTIONARY}}})", "{{dict_code}}"),
                ),
                graph(
                    "Memory of dictionaries",
                    "Share of `refdata.query.memoryLimitMb`, by pod. Bad: towards 100 %: loads are refused there.",
                    ("penstock_refdata_memory_bytes{@} / penstock_refdata_memory_limit_bytes{@}", "{{instance}}"),
                    unit="percentunit",
                    bad=0.8,
                ),
                graph(
                    "Audits",
                    "In an hour, by result. Bad: `disagrees`; `failed` all the time: nothing is compared.",
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
    "What suppliers delivered, what is published, and what was refused.",
    [
        Row(
            "Now",
            [
                stat(
                    "Suppliers with an alert",
                    "Bad: anything but 0; which ones and why is below.",
                    "count(max by (supplier) (penstock_ingest_alert{@}) > 0) or vector(0)",
                    width=6,
                    bad=1,
                ),
                stat(
                    "Oldest published state",
                    "Bad: older than deliveries are apart.",
                    "max(penstock_ingest_state_age_seconds{@})",
                    "s",
                    width=6,
                    warn=_DAY,
                    bad=2 * _DAY,
                ),
                stat(
                    "Files that wait",
                    "In all inboxes. Bad: a number that does not fall: the watcher is down or runs fail.",
                    "sum(max by (supplier) (penstock_ingest_inbox_files{@}))",
                    width=6,
                    warn=10,
                    bad=50,
                ),
                stat(
                    "Files in quarantine",
                    "They could not be published, and wait for somebody. Bad: a number that grows.",
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
                    "1 while somebody should look. Bad: any line.",
                    (f"max by (supplier, alert) (penstock_ingest_alert{_OF_SUPPLIER}}}) > 0", "{{supplier}} {{alert}}"),
                    empty="none",
                ),
                graph(
                    "Age of the published state",
                    "By supplier. Good: a saw, as regular as the deliveries. Bad: a line that only rises.",
                    (f"max by (supplier) (penstock_ingest_state_age_seconds{_OF_SUPPLIER}}})", "{{supplier}}"),
                    unit="s",
                    bad=2 * _DAY,
                ),
                graph(
                    "Facts published",
                    "By supplier. Bad: a step downwards nobody announced.",
                    (f"max by (supplier) (penstock_ingest_state_facts{_OF_SUPPLIER}}})", "{{supplier}}"),
                ),
                graph(
                    "Files that wait",
                    "By supplier. Bad: a line that stays.",
                    (f"max by (supplier) (penstock_ingest_inbox_files{_OF_SUPPLIER}}})", "{{supplier}}"),
                ),
                graph(
                    "Files in quarantine",
                    "By supplier. Bad: steps upwards.",
                    (f"max by (supplier) (penstock_ingest_quarantined_files{_OF_SUPPLIER}}})", "{{supplier}}"),
                ),
                graph(
                    "Failures in a row, same file again",
                    "By supplier. Bad: failures above 2; the same file above 4: the supplier's export stands still.",
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
                    "That ended in an hour, by supplier and status. Bad: FAIL.",
                    (
                        f"sum by (supplier, status) (increase(penstock_ingest_runs_total{_OF_SUPPLIER}}}[1h]))",
                        "{{supplier}} {{status}}",
                    ),
                ),
                graph(
                    "Why runs failed",
                    "In an hour, by reason. Bad: any line; the reason's meaning is in docs/etl/reason_codes.yaml.",
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
    "How far feeds are known, what runs fetch, and what goes wrong.",
    [
        Row(
            "Now",
            [
                stat(
                    "Furthest behind",
                    "Since the watermark of the feed that is worst off. Bad: more than a few of its intervals. Empty "
                    "until a run has completed since the workers started.",
                    f"time() - min(max by (feed) (penstock_harvest_watermark_seconds{_OF_FEED}}}))",
                    "s",
                    width=6,
                    warn=_HOUR,
                    bad=6 * _HOUR,
                ),
                stat(
                    "Partitions failed, last hour",
                    "Their runs do not complete by themselves. Bad: anything but 0.",
                    f'sum(increase(penstock_harvest_partitions_total{_OF_FEED},status="failed"}}[1h])) or vector(0)',
                    width=6,
                    bad=1,
                ),
                stat(
                    "Alerts nobody was told of",
                    "The mail server or webhook does not take them. Bad: anything but 0.",
                    "max(penstock_harvest_alerts_undelivered{@})",
                    width=6,
                    bad=1,
                ),
                stat(
                    "Runs completed, last day",
                    "Bad: fewer than the schedule says.",
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
                    "Behind",
                    "Since the watermark, by feed. Good: a saw. Bad: a line that only rises.",
                    (f"time() - max by (feed) (penstock_harvest_watermark_seconds{_OF_FEED}}})", "{{feed}}"),
                    unit="s",
                    bad=6 * _HOUR,
                ),
                graph(
                    "Runs behind",
                    "Age of the watermark in runs that were due, by feed with a schedule. Bad: above 3.",
                    (
                        f"(time() - max by (feed) (penstock_harvest_watermark_seconds{_OF_FEED}}}))"
                        f" / on (feed) max by (feed) (penstock_harvest_interval_seconds{_OF_FEED}}})",
                        "{{feed}}",
                    ),
                    bad=3,
                ),
                graph(
                    "Runs completed",
                    "In a day, by feed and type. Bad: no `full` for longer than `full_every`: what is gone stays.",
                    (
                        f"sum by (feed, type) (increase(penstock_harvest_runs_completed_total{_OF_FEED}}}[1d]))",
                        "{{feed}} {{type}}",
                    ),
                ),
                graph(
                    "What went wrong",
                    "In five minutes, by feed and code. Bad: a line that lasts: the source throttles, lies or is down.",
                    (
                        f"sum by (feed, code) (increase(penstock_harvest_failures_total{_OF_FEED}}}[5m]))",
                        "{{feed}} {{code}}",
                    ),
                ),
                graph(
                    "Partitions",
                    "That ended in an hour, by feed and status. Bad: `failed`.",
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
                    "Fetched a second, by feed. Bad: 0 while a run is under way.",
                    (f"sum by (feed) (rate(penstock_harvest_pages_total{_OF_FEED}}}{_RATE}))", "{{feed}}"),
                    unit="ops",
                ),
                graph(
                    "Records",
                    "Fetched and made canonical a second, by feed. Bad: fetched without end, and none canonical.",
                    (f"sum by (feed) (rate(penstock_harvest_records_total{_OF_FEED}}}{_RATE}))", "{{feed}} fetched"),
                    (
                        f"sum by (feed) (rate(penstock_harvest_consolidated_records_total{_OF_FEED}}}{_RATE}))",
                        "{{feed}} canonical",
                    ),
                    unit="ops",
                ),
                graph(
                    "Records set aside",
                    "Share of those fetched, by feed. Bad: towards `limits.max_reject_ratio`, where a run fails.",
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
    "Runs under way, steps that wait for workers, and how steps end.",
    [
        Row(
            "Now",
            [
                stat(
                    "Oldest step waits",
                    "Of all kinds. Bad: minutes, and growing: nobody works on its kind, or a limit holds it.",
                    "max(penstock_flow_oldest_ready_step_seconds{@}) or vector(0)",
                    "s",
                    width=6,
                    warn=5 * _MINUTE,
                    bad=15 * _MINUTE,
                ),
                stat(
                    "Steps failed, last hour",
                    "Each failed attempt of our own workers. Bad: more than is usual.",
                    'sum(increase(penstock_flow_steps_total{@,outcome="FAILED"}[1h])) or vector(0)',
                    width=6,
                    warn=1,
                    bad=20,
                ),
                stat(
                    "Runs under way",
                    "Bad: a number that only grows: runs begin and do not end.",
                    "sum(max by (status) (penstock_flow_runs_active{@})) or vector(0)",
                    width=6,
                    warn=1000,
                ),
                stat(
                    "Runs set right, last day",
                    "A crash left them astray, and they were mended. Bad: many; processes die.",
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
                    "Steps that wait for a worker",
                    "By kind. Bad: one that grows while others are done: its workers are too few or gone.",
                    (f"max by (kind) (penstock_flow_steps_ready{_OF_KIND}}})", "{{kind}}"),
                ),
                graph(
                    "Oldest step that waits",
                    "By kind. Bad: a line at 45 degrees: nothing of this kind is taken at all.",
                    (f"max by (kind) (penstock_flow_oldest_ready_step_seconds{_OF_KIND}}})", "{{kind}}"),
                    unit="s",
                    bad=15 * _MINUTE,
                ),
                graph(
                    "Runs under way",
                    "By status. Bad: a line that only rises.",
                    ("max by (status) (penstock_flow_runs_active{@})", "{{status}}"),
                ),
                graph(
                    "Runs set right",
                    "In an hour. Bad: anything that lasts.",
                    ("sum(increase(penstock_flow_runs_repaired_total{@}[1h]))", "set right"),
                ),
            ],
        ),
        Row(
            "Steps of our own workers",
            [
                graph(
                    "Steps",
                    "That ended a second, by kind and outcome. Bad: FAILED; RELEASED: workers come and go.",
                    (
                        f"sum by (kind, outcome) (rate(penstock_flow_steps_total{_OF_KIND}}}{_RATE}))",
                        "{{kind}} {{outcome}}",
                    ),
                    unit="ops",
                ),
                graph(
                    "Time of a step, 95 of 100",
                    "By kind. Bad: a kind that was quick and is not.",
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
