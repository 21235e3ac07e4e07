"""How updates and versions look on the wire."""

from penstock.refdata.api import schemas
from penstock.refdata.contract import PREFIX
from penstock.refdata.model import Update, Version


def accepted(update: Update) -> schemas.Accepted:
    url = f"{PREFIX}/{update.tenant_id}/updates/{update.event_id}"
    return schemas.Accepted(event_id=update.event_id, status=update.status, status_url=url)


def update_status(update: Update) -> schemas.UpdateStatus:
    return schemas.UpdateStatus(
        event_id=update.event_id,
        tenant_id=update.tenant_id,
        dict_code=update.dict_code,
        status=update.status,
        committed_version=update.committed_version,
        error=update.error_message,
        error_code=update.error_code,
        created_at=update.created_at,
        updated_at=update.updated_at,
    )


def dictionary_version(version: Version) -> schemas.DictionaryVersion:
    return schemas.DictionaryVersion(**version._asdict())
