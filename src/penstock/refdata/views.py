"""How updates and versions look on the wire."""

from penstock.refdata import wire
from penstock.refdata.contract import PREFIX
from penstock.refdata.model import Update, Version


def accepted(update: Update) -> wire.Accepted:
    url = f"{PREFIX}/{update.tenant_id}/updates/{update.event_id}"
    return wire.Accepted(event_id=update.event_id, status=update.status, status_url=url)


def update_status(update: Update) -> wire.UpdateStatus:
    return wire.UpdateStatus(
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


def dictionary_version(version: Version) -> wire.DictionaryVersion:
    return wire.DictionaryVersion(**version._asdict())
