"""Settings documents for tests, and the configuration file that processes read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.services.kafka import Kafka
from tests.support.types import Json


def settings_document(
    url: str, kafka: Kafka | None = None, bus: Mapping[str, Any] | None = None, **sections: Any
) -> Json:
    """Return settings on the database at *url*, and on Kafka with the options *bus* if a broker is given."""
    kafka_section = {"kafka": {"bootstrap": kafka.bootstrap, **(bus or {})}} if kafka else {}
    return {"database": {"url": url}, "bus": kafka_section, **sections}


def write_config(folder: Path, document: Json | str) -> None:
    """Write penstock.yaml in *folder* in one step, so that a running process never reads half of it."""
    draft = folder / "penstock.new"
    draft.write_text(document if isinstance(document, str) else json.dumps(document))
    draft.replace(folder / "penstock.yaml")
