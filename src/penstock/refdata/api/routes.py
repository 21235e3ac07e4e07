"""R6, R7, R30: the command API: updates, and the history, retained versions, pins and rollbacks of dictionaries."""

from datetime import datetime, timedelta
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response

from penstock.kernel.db import page
from penstock.kernel.db.page import Cursor, Limit
from penstock.kernel.errors import Invalid
from penstock.kernel.http.app import Caller, get_service
from penstock.refdata import contract
from penstock.refdata.api import schemas
from penstock.refdata.commands.service import LAST_ID, LATEST, Refdata
from penstock.refdata.contract import NAME, PREFIX, UpdateState
from penstock.refdata.model import DictionaryKey, UpdateRecord, VersionRecord

_LATEST_VERSION = 2**63 - 1
_BODY = {"requestBody": {"required": True, "content": {"application/json": {"schema": contract.make_json_schema()}}}}
Code = Annotated[str, Path(alias="dictCode", pattern=NAME)]


def make_accepted(update: UpdateRecord) -> schemas.CommandAccepted:
    url = f"{PREFIX}/{update.tenant_id}/updates/{update.event_id}"
    return schemas.CommandAccepted(event_id=update.event_id, status=update.status, status_url=url)


def make_update(update: UpdateRecord) -> schemas.UpdateView:
    return schemas.UpdateView(
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


def make_version(version: VersionRecord) -> schemas.DictionaryVersion:
    return schemas.DictionaryVersion(**version._asdict())


routes = APIRouter(prefix=PREFIX, tags=["refdata"])


# Async although they do not wait: FastAPI runs other dependencies in a thread.
async def _get_refdata(request: Request) -> Refdata:
    return get_service(request, Refdata)


async def _check_tenant(
    tenant_id: Annotated[str, Path(alias="tenantId", pattern=NAME)],
    refdata: Annotated[Refdata, Depends(_get_refdata)],
    caller: Caller,
    named: Annotated[
        str | None,
        Header(
            alias="X-Tenant-Id",
            description="Tenant to act for; only for trusted clients.",
        ),
    ] = None,
) -> str:
    """R25: return the tenant of the path; Forbidden unless the caller may act for it."""
    caller.require_tenant(tenant_id, claimed=refdata.section.security.tenant.read_tenant(caller, named))
    return tenant_id


Service = Annotated[Refdata, Depends(_get_refdata)]
Tenant = Annotated[str, Depends(_check_tenant)]


@routes.post(
    "/{tenantId}/updates",
    status_code=202,
    responses={200: {"model": schemas.CommandCommitted, "description": "Committed"}},
    openapi_extra=_BODY,
)
async def submit(
    request: Request,
    response: Response,
    tenant: Tenant,
    refdata: Service,
    mode: Annotated[schemas.ConsistencyMode, Query(alias="consistencyMode")] = schemas.ConsistencyMode.ASYNC,
    timeout_ms: Annotated[int | None, Query(alias="timeoutMs", ge=50, le=1000)] = None,
) -> schemas.CommandAccepted | schemas.CommandCommitted:
    """R6: send a command that changes a dictionary. WAIT_COMMIT waits for the commit, not for the pods to load it."""
    command = contract.decode_command(await request.body())
    waits = mode is schemas.ConsistencyMode.WAIT_COMMIT
    within = timedelta(milliseconds=timeout_ms or refdata.section.consistency.wait_commit_timeout_ms)
    update = await refdata.submit(tenant, command, within if waits else None)
    return _make_response(update, response) if waits else make_accepted(update)


@routes.get("/{tenantId}/updates/{eventId}")
async def show_update(
    tenant: Tenant, event_id: Annotated[UUID, Path(alias="eventId")], refdata: Service
) -> schemas.UpdateView:
    """R7: return an update with its state."""
    return make_update(await refdata.get_update(tenant, event_id))


@routes.get("/{tenantId}/updates")
async def list_updates(
    tenant: Tenant,
    refdata: Service,
    status: Annotated[UpdateState, Query(description="State of the updates, PENDING or FAILED.")] = UpdateState.FAILED,
    dict_code: Annotated[str | None, Query(alias="dictCode", pattern=NAME)] = None,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> schemas.UpdatePage:
    """Return the pending or failed updates, latest first."""
    if status is UpdateState.COMMITTED:
        raise Invalid(
            "STATUS_NOT_LISTABLE",
            "committed updates cannot be listed",
            hint=f"request the committed versions of a dictionary: GET {PREFIX}/{tenant}/history/{dict_code or 'CODE'}",
        )
    moment, event_id = page.decode_start(cursor, [datetime, UUID], (LATEST, LAST_ID))
    updates = await refdata.list_updates(tenant, status, dict_code, before=(moment, event_id), limit=limit)
    return schemas.UpdatePage(updates=[make_update(update) for update in updates.items], next=updates.next)


@routes.get("/{tenantId}/dictionaries")
async def list_dictionaries(tenant: Tenant, refdata: Service) -> schemas.DictionaryList:
    """Return the dictionaries of a tenant with their last committed versions."""
    found = await refdata.list_dictionaries(tenant)
    views = [schemas.DictionaryView(dict_code=code, **head._asdict()) for code, head in found.items()]
    return schemas.DictionaryList(tenant_id=tenant, dictionaries=views)


@routes.get("/{tenantId}/history/{dictCode}")
async def show_history(
    tenant: Tenant, dict_code: Code, refdata: Service, limit: Limit = 100, cursor: Cursor = None
) -> schemas.VersionHistory:
    """R30: return the versions of a dictionary and their commands, latest first."""
    (before,) = page.decode_start(cursor, [int], [_LATEST_VERSION])
    history = await refdata.list_versions(DictionaryKey(tenant, dict_code), before=before, limit=limit)
    versions = [make_version(version) for version in history.items]
    return schemas.VersionHistory(tenant_id=tenant, dict_code=dict_code, versions=versions, next=history.next)


@routes.get("/{tenantId}/retained/{dictCode}")
async def list_retained(tenant: Tenant, dict_code: Code, refdata: Service) -> schemas.RetainedVersionList:
    """R30: return the retained versions, which can be pinned or restored, latest first."""
    retained = await refdata.retention.list_retained(DictionaryKey(tenant, dict_code))
    versions = [schemas.RetainedVersionView(**version._asdict()) for version in retained]
    return schemas.RetainedVersionList(tenant_id=tenant, dict_code=dict_code, versions=versions)


@routes.post("/{tenantId}/retained/{dictCode}")
async def retain(tenant: Tenant, dict_code: Code, refdata: Service) -> schemas.VersionChoice:
    """R30: retain the last version."""
    return schemas.VersionChoice(version=await refdata.retention.retain(DictionaryKey(tenant, dict_code)))


@routes.put("/{tenantId}/pins/{dictCode}")
async def pin(
    tenant: Tenant, dict_code: Code, chosen: schemas.VersionChoice, refdata: Service
) -> schemas.VersionChoice:
    """R30: make readers get a retained version, or the current one, also after later commits."""
    await refdata.retention.pin(DictionaryKey(tenant, dict_code), chosen.version)
    return chosen


@routes.delete("/{tenantId}/pins/{dictCode}")
async def unpin(tenant: Tenant, dict_code: Code, refdata: Service) -> schemas.VersionChoice:
    """R30: make readers get the last version again, and return the version that was pinned."""
    return schemas.VersionChoice(version=await refdata.retention.unpin(DictionaryKey(tenant, dict_code)))


@routes.post(
    "/{tenantId}/rollbacks/{dictCode}",
    status_code=202,
    responses={200: {"model": schemas.CommandCommitted, "description": "Committed"}},
)
async def roll_back(
    tenant: Tenant, dict_code: Code, chosen: schemas.VersionChoice, response: Response, refdata: Service
) -> schemas.CommandAccepted | schemas.CommandCommitted:
    """R30: restore a retained version as a new version."""
    within = timedelta(milliseconds=refdata.section.consistency.wait_commit_timeout_ms)
    return _make_response(await refdata.roll_back(DictionaryKey(tenant, dict_code), chosen.version, within), response)


def _make_response(update: UpdateRecord, response: Response) -> schemas.CommandAccepted | schemas.CommandCommitted:
    """Return the response to a request that waited for the commit."""
    if update.status is UpdateState.PENDING:
        return make_accepted(update)
    if update.status is UpdateState.FAILED:
        message, code = update.error_message or "the update failed", update.error_code or "FAILED"
        hint = "fix the command and send it again with a new eventId"
        raise Invalid(code, message, hint=hint, eventId=str(update.event_id))
    response.status_code = 200
    return schemas.CommandCommitted(event_id=update.event_id, committed_version=update.committed_version or 0)
