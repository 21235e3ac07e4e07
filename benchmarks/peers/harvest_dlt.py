"""A paged API into PostgreSQL with dlt's REST source: `harvest_dlt.py ORDER`, a JSON document (see `Order`).

One resource pages through everything, as dlt's documentation shows it; given ranges, a resource each, in parallel.
"""

import json
import os
import sys
from pathlib import Path
from time import perf_counter
from typing import Any, TypedDict

import dlt  # type: ignore[import-not-found]
from dlt.destinations.impl.postgres.configuration import PostgresCredentials  # type: ignore[import-not-found]
from dlt.sources.rest_api import rest_api_source  # type: ignore[import-not-found]

TABLE = "records"
FORMAT = "csv"  # COPY; a little less work than its INSERTs


class Order(TypedDict):
    """What is wanted of dlt."""

    source: str
    sockets: str  # the folder of PostgreSQL's socket
    database: str
    folder: str  # for its own files
    page: int
    ranges: list[dict[str, str]]  # parameters of each resource; none: one resource for all
    settings: dict[str, str]


def harvest(order: Order) -> dict[str, Any]:
    """Extract, normalize and load; what each took."""
    os.environ.update(order["settings"])
    address = {"host": order["sockets"]}  # it counts more than the host of the URL, which dlt wants to have
    credentials = PostgresCredentials(
        {"host": "localhost", "username": "postgres", "password": "", "database": order["database"], "query": address}
    )
    pipeline = dlt.pipeline(
        "harvest",
        destination=dlt.destinations.postgres(credentials),
        dataset_name="harvested",
        pipelines_dir=order["folder"],
    )
    began, used = perf_counter(), _processor()
    # Merged by its key as ours is: what is taken twice is there once.
    pipeline.extract(_source(order), write_disposition="merge", loader_file_format=FORMAT)
    extracted = perf_counter()
    pipeline.normalize()
    normalized = perf_counter()
    pipeline.load()
    loaded, used = perf_counter(), _processor() - used
    with pipeline.sql_client() as client:
        [[rows]] = client.execute_sql(f"SELECT count(*) FROM {TABLE}")
    return {
        "rows": rows,
        "seconds": loaded - began,
        "extract": extracted - began,
        "normalize": normalized - extracted,
        "load": loaded - normalized,
        "processor": used,
    }


def _source(order: Order) -> Any:
    ranges = order["ranges"] or [{}]
    source = rest_api_source(
        {
            "client": {
                "base_url": order["source"],
                "paginator": {"type": "offset", "limit": order["page"], "total_path": "total"},
            },
            "resource_defaults": {
                "primary_key": "id",
                "table_name": TABLE,
            },
            "resources": [
                {
                    "name": f"part_{number}",
                    "endpoint": {"path": "records", "data_selector": "items", "params": parameters},
                }
                for number, parameters in enumerate(ranges)
            ],
        },
        parallelized=bool(order["ranges"]),  # the same word in a resource's own configuration does nothing
    )
    source.max_table_nesting = 0  # what is nested stays JSON, as in our raw records: columns of it take longer
    return source


def _processor() -> float:
    """What this process and its ended children took of the processors so far."""
    return sum(os.times()[:4])


if __name__ == "__main__":
    print(json.dumps(harvest(json.loads(Path(sys.argv[1]).read_text()))))
