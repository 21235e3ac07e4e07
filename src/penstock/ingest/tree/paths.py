"""I1: the paths of all files below a root. The names are those of the founding document."""

OPS = "etl_ops"
DATA = "etl_data/raw_v1"
CONFIGS = f"{OPS}/config"
LEDGERS = f"{OPS}/ledger"
INBOX = f"{DATA}/inbox"
QUARANTINE = f"{DATA}/quarantine"
ARCHIVE = f"{DATA}/archive"
ACCEPTED = f"{DATA}/accepted_runs"
RUNS = f"{DATA}/runs"
STATES = f"{DATA}/state_store"
CURRENT = f"{DATA}/state/current"

FACTS = "facts.ndjson"
BAD = "bad.ndjson"
STATS = "stats.json"
MANIFEST = "manifest.json"
STARTED = "diag/started.json"
ERROR = "diag/error.txt"
POINTER = "pointer.json"
CHANGES = "changes.json"
CHANGED_KEYS = "changes.ndjson"
_TEMPORARY = (".tmp", ".part")


def config(supplier: str) -> str:
    return f"{CONFIGS}/{supplier}.yaml"


def ledger(supplier: str) -> str:
    return f"{LEDGERS}/{supplier}.json"


def inbox(supplier: str) -> str:
    return f"{INBOX}/{supplier}"


def duplicates(supplier: str) -> str:
    return f"{QUARANTINE}/{supplier}/duplicates"


def broken(supplier: str) -> str:
    return f"{QUARANTINE}/{supplier}/broken"


def obsolete(supplier: str) -> str:
    return f"{ARCHIVE}/{supplier}/obsolete"


def archive(supplier: str) -> str:
    """Return the folder of published files, for which the founding document has no name."""
    return f"{ARCHIVE}/{supplier}"


def accepted(supplier: str, sha256: str) -> str:
    return f"{ACCEPTED}/{supplier}/{sha256[:2]}/{sha256}.json"


def run(run_id: str, file: str = "") -> str:
    return f"{RUNS}/{run_id}/{file}" if file else f"{RUNS}/{run_id}"


def state(supplier: str, run_id: str, file: str = "") -> str:
    return f"{STATES}/{supplier}/{run_id}/{file}" if file else f"{STATES}/{supplier}/{run_id}"


def is_temporary(name: str) -> bool:
    """I3: return whether the name marks an unfinished file."""
    return name.startswith(".") or name.lower().endswith(_TEMPORARY)
