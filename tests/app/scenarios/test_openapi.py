"""Every answer is as the OpenAPI document declares it, and nothing makes the server fail."""

from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.support.processes import Up

SECRET = "a secret of thirty-two bytes or more"
WITH_TOKENS = {
    "SIGNING_SECRET": SECRET,
    "PENSTOCK__AUTH__JWT__SECRET": "env:SIGNING_SECRET",
    "PENSTOCK__AUTH__JWT__ALGORITHMS": "[HS256]",
    "PENSTOCK__AUTH__JWT__AUDIENCE": "penstock",
}


def token(**claims: object) -> dict[str, str]:
    known = {"sub": "ann", "tenant_id": "a", "aud": "penstock", "exp": 4_000_000_000}
    return {"authorization": "Bearer " + jwt.encode({**known, **claims}, SECRET, algorithm="HS256")}


@pytest.mark.full
@pytest.mark.parametrize("port", ["api", "query"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_document_is_kept(tmp_path: Path, port: str) -> None:
    """R27: whatever is sent, no 5xx, and every status, header and body as declared."""
    with Up(tmp_path) as up:
        schema = schemathesis.openapi.from_url(f"{getattr(up, port)}/openapi.json")
        for found in schema.get_all_operations():
            assert isinstance(found, Ok)
            operation = found.ok()
            if operation.path.endswith("/events"):  # a stream has no end to wait for; its own tests read it
                continue

            probes = 4 if "/flow" in operation.path else 12  # many routes, with tests of their own

            @settings(max_examples=probes, deadline=None, suppress_health_check=list(HealthCheck), database=None)
            @given(case=operation.as_strategy())
            def probe(case: Case[Any]) -> None:
                if isinstance(case.body, dict):
                    case.body.update({name: 0 for name in ("wait_seconds", "waitSeconds") if name in case.body})
                # A cursor can match the schema and still be invalid, so valid data may be refused.
                case.call_and_validate(excluded_checks=[positive_data_acceptance])

            probe()


@pytest.mark.full
def test_with_authentication_a_valid_token_is_required(tmp_path: Path) -> None:
    """R25: no token, an expired token or another audience is 401; health and metrics need no token."""
    with Up(tmp_path, env=WITH_TOKENS) as up:
        whoami = f"{up.api}/api/v1/whoami"
        assert httpx.get(whoami).status_code == 401
        assert httpx.get(whoami, headers=token(exp=1)).json()["code"] == "TOKEN_EXPIRED"
        assert httpx.get(whoami, headers=token(aud="another")).json()["code"] == "BAD_TOKEN"
        mine = httpx.get(whoami, headers=token()).json()
        assert mine == {"subject": "ann", "tenant": "a", "isOperator": False}
        assert httpx.get(f"{up.api}/actuator/health").status_code == 200
        assert httpx.get(f"{up.api}/actuator/prometheus").status_code == 200
        assert SECRET not in up.log_file.read_text()


@pytest.mark.full
def test_with_tokens_it_may_listen_beyond_loopback(tmp_path: Path) -> None:
    """R25: only with authentication may other machines connect."""
    with Up(tmp_path, "--host", "0.0.0.0", env=WITH_TOKENS) as up:
        port = up.api.rpartition(":")[2]
        answer = httpx.get(f"http://127.0.0.1:{port}/api/v1/whoami", headers={**token(), "host": "any.name"})
        assert answer.status_code == 200
