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


def make_config_path(supplier: str) -> str:
    return f"{CONFIGS}/{supplier}.yaml"


def make_ledger_path(supplier: str) -> str:
    return f"{LEDGERS}/{supplier}.json"


def make_inbox_path(supplier: str) -> str:
    return f"{INBOX}/{supplier}"


def make_duplicates_path(supplier: str) -> str:
    return f"{QUARANTINE}/{supplier}/duplicates"


def make_broken_path(supplier: str) -> str:
    return f"{QUARANTINE}/{supplier}/broken"


def make_obsolete_path(supplier: str) -> str:
    return f"{ARCHIVE}/{supplier}/obsolete"


def make_archive_path(supplier: str) -> str:
    """Return the folder of published files, for which the founding document has no name."""
    return f"{ARCHIVE}/{supplier}"


def make_accepted_path(supplier: str, sha256: str) -> str:
    return f"{ACCEPTED}/{supplier}/{sha256[:2]}/{sha256}.json"


def make_run_path(run_id: str, file: str = "") -> str:
    return f"{RUNS}/{run_id}/{file}" if file else f"{RUNS}/{run_id}"


def make_state_path(supplier: str, run_id: str, file: str = "") -> str:
    return f"{STATES}/{supplier}/{run_id}/{file}" if file else f"{STATES}/{supplier}/{run_id}"


def is_temporary(name: str) -> bool:
    """I3: return whether the name marks an unfinished file."""
    return name.startswith(".") or name.lower().endswith(_TEMPORARY)
