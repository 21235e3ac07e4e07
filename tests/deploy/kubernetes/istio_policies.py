"""What the AuthorizationPolicies of deploy/istio say of one request, by the rules Istio documents."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.types import Json

_CLAIM = "request.auth.claims["


@dataclass(frozen=True)
class IstioRequest:
    """A request as the proxy before a pod sees it; without *claims* it had no token."""

    component: str
    method: str
    path: str
    peer: str
    claims: Mapping[str, Any] = field(default_factory=dict)

    @property
    def labels(self) -> dict[str, str]:
        return {
            "app.kubernetes.io/name": "penstock",
            "app.kubernetes.io/instance": "penstock",
            "app.kubernetes.io/component": self.component,
        }

    @property
    def principal(self) -> str:
        return f"{self.claims['iss']}/{self.claims['sub']}" if self.claims else ""


def is_let_in(policies: Sequence[Json], asked: IstioRequest) -> bool:
    """No DENY applies, and some ALLOW does."""
    here = [policy["spec"] for policy in policies if _selects(policy["spec"], asked)]
    denied = [spec for spec in here if spec.get("action") == "DENY" and _applies(spec, asked)]
    return not denied and any(spec.get("action", "ALLOW") == "ALLOW" and _applies(spec, asked) for spec in here)


def _selects(spec: Json, asked: IstioRequest) -> bool:
    wanted: Mapping[str, str] = spec.get("selector", {}).get("matchLabels", {})
    return wanted.items() <= asked.labels.items()


def _applies(spec: Json, asked: IstioRequest) -> bool:
    return any(
        _some(rule.get("from"), "source", asked)
        and _some(rule.get("to"), "operation", asked)
        and all(_holds(condition, asked) for condition in rule.get("when", ()))
        for rule in spec.get("rules", ())
    )


def _some(listed: Sequence[Json] | None, inner: str, asked: IstioRequest) -> bool:
    return listed is None or any(_all(entry[inner], asked) for entry in listed)


def _all(fields: Json, asked: IstioRequest) -> bool:
    known = {
        "principals": asked.peer,
        "requestPrincipals": asked.principal,
        "methods": asked.method,
        "paths": asked.path,
    }
    return all(_matches(values, known[name]) for name, values in fields.items())


def _holds(condition: Json, asked: IstioRequest) -> bool:
    assert condition["key"].startswith(_CLAIM)
    texts = _texts(asked.claims.get(condition["key"].removeprefix(_CLAIM).removesuffix("]")))
    wanted = any(_matches(condition["values"], text) for text in texts) if "values" in condition else True
    return wanted and not any(_matches(condition.get("notValues", ()), text) for text in texts)


def _texts(claim: object) -> list[str]:
    """What of a claim is compared: a text, or the texts of a list; anything else is as if it were not there."""
    listed = claim if isinstance(claim, list) else [claim]
    return [entry for entry in listed if isinstance(entry, str)]


def _matches(values: Sequence[str], text: str) -> bool:
    """Exact, by its beginning or its end, or there at all."""
    return bool(text) and any(
        value == text
        or value == "*"
        or (value.endswith("*") and text.startswith(value[:-1]))
        or (value.startswith("*") and text.endswith(value[1:]))
        for value in values
    )
