"""The environment of what our harvest is measured beside: dlt, with all that its PostgreSQL destination can use."""

from pathlib import Path

from benchmarks import peers
from benchmarks.peers import ingest_env

FOLDER = peers.ENVIRONMENTS.with_name("peers-harvest")
_DLT = next(requirement for requirement in ingest_env.REQUIREMENTS if requirement.startswith("dlt=="))
REQUIREMENTS = (
    _DLT,
    "psycopg2-binary==2.9.13",
    "orjson==3.13.0",  # dlt takes it for JSON where it is there
)
DLT = peers.HERE / "harvest_dlt.py"


async def python() -> Path:
    """Return the python of that environment, which is made unless it already has exactly these versions."""
    return await peers.environment(str(FOLDER), *REQUIREMENTS)  # an absolute folder stays where it is
