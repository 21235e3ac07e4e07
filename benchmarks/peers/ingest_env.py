"""The environments and scripts of the peers of ingest.

All share one environment: they need nothing that contradicts, and only one of them runs at a time.
"""

from pathlib import Path

from benchmarks import peers

FOLDER = peers.ENVIRONMENTS.with_name("peers-ingest")
REQUIREMENTS = (
    "duckdb==2.0.0",
    "dlt==1.31.0",
    "openpyxl==3.1.5",
    "python-calamine==0.9.0",
    "orjson==3.13.0",  # writes the JSON of dlt, and of the peers that are libraries only
    "pyarrow==26.0.1",
)
DUCKDB = peers.HERE / "ingest_duckdb.py"
DLT = peers.HERE / "ingest_dlt.py"
OPENPYXL = peers.HERE / "ingest_openpyxl.py"
CALAMINE = peers.HERE / "ingest_calamine.py"
WORKBOOK = peers.HERE / "ingest_workbook.py"


async def python() -> Path:
    """Return the python of that environment, which is made unless it already has exactly these versions."""
    return await peers.environment(str(FOLDER), *REQUIREMENTS)  # an absolute folder stays where it is
