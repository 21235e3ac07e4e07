"""A CSV into facts with DuckDB, in SQL: `ingest_duckdb.py INPUT OUTPUT_DIR [MEMORY_LIMIT]`.

The rows are typed into a temporary table and numbered by its rowid: numbering them with a window while the file is
read makes one thread of what follows and takes twice as long. Threads and the insertion order are DuckDB's defaults.
"""

import sys
from pathlib import Path

import duckdb  # type: ignore[import-not-found]

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.peers.ingest_facts import FIRST_ROW, RUN_ID, SUPPLIER, measured

TYPED = """
CREATE TEMP TABLE typed AS
SELECT nullif(trim(sku), '') AS sku,
       trim(name) AS name,
       trim(brand) AS brand,
       try_cast(ltrim(qty, '> ') AS BIGINT) AS qty,
       (try_cast(replace(replace(price, ' ', ''), ',', '.') AS DECIMAL(18, 2)) * 100)::BIGINT AS price_minor,
       strftime(try_strptime(date, '%d.%m.%Y'), '%Y-%m-%d') AS date
FROM read_csv('{source}', delim = ';', quote = '"', escape = '"', header = true, all_varchar = true)
"""
FACTS = f"""
COPY (
    SELECT '{RUN_ID}' AS run_id, '{SUPPLIER}' AS supplier, sha256(payload::VARCHAR) AS row_id, row_number, payload
    FROM (
        SELECT rowid + {FIRST_ROW} AS row_number,
               json_object('brand', brand, 'date', date, 'name', name,
                           'price_minor', price_minor, 'qty', qty, 'sku', sku) AS payload
        FROM typed
        WHERE sku IS NOT NULL AND qty IS NOT NULL AND price_minor IS NOT NULL AND date IS NOT NULL
    )
) TO '{{folder}}/facts.ndjson' (FORMAT json)
"""
BAD = f"""
COPY (
    SELECT '{RUN_ID}' AS run_id, '{SUPPLIER}' AS supplier, rowid + {FIRST_ROW} AS row_number,
           CASE WHEN sku IS NULL THEN 'REQUIRED_MISSING' WHEN date IS NULL THEN 'NOT_DATE'
                WHEN price_minor IS NULL THEN 'NOT_MONEY' ELSE 'NOT_INTEGER' END AS reason_code
    FROM typed
    WHERE sku IS NULL OR qty IS NULL OR price_minor IS NULL OR date IS NULL
) TO '{{folder}}/bad.ndjson' (FORMAT json)
"""


def ingest(source: Path, folder: Path) -> int:
    with duckdb.connect() as db:
        if len(sys.argv) > 3:
            db.execute(f"SET memory_limit = '{sys.argv[3]}'")
            db.execute(f"SET temp_directory = '{folder}/spilled'")
        db.execute(TYPED.format(source=source))
        db.execute(FACTS.format(folder=folder))
        db.execute(BAD.format(folder=folder))
        [(rows,)] = db.execute("SELECT count(*) FROM typed").fetchall()
    return int(rows)


if __name__ == "__main__":
    measured(ingest)
