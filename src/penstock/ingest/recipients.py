"""I23: who is told of a publication, as a supplier's configuration names them."""

import hashlib
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from penstock.flows.contract import NAME
from penstock.kernel.config.loader import SecretRef, Section
from penstock.kernel.config.sections import Url

Name = Annotated[str, Field(min_length=1, max_length=200)]


class DictionaryTarget(Section):
    """I23: a dictionary of refdata that becomes what is published, by the supplier's key."""

    tenant: Name = Field(description="Whose dictionary.")
    code: Name = Field(description="Which one.")
    url: Url = Field("http://127.0.0.1:8080", description="The API of refdata.")
    token: SecretRef | None = Field(None, description="Sent as a bearer.")


class FlowTarget(Section):
    """I23: a flow that a publication starts, once, unless a newer one took its place; the run's scope tells which."""

    name: Annotated[str, Field(pattern=NAME)] = Field(description="Which flow.")
    scope: dict[str, Any] = Field(default_factory=dict, description="Beside `supplier`, `runId`, `fence` and `facts`.")
    url: Url = Field("http://127.0.0.1:8080", description="The API of flows.")
    token: SecretRef | None = Field(None, description="Sent as a bearer.")


class WebhookTarget(Section):
    """I23: an address that is told of every publication, at least once."""

    url: Url = Field(description="Where it is posted.")
    secret: SecretRef | None = Field(None, description="Signs the body: X-Penstock-Signature, HMAC-SHA256.")


class Target(Section):
    """I23: who is told of a publication."""

    dictionary: DictionaryTarget | None = None
    flow: FlowTarget | None = None
    webhook: WebhookTarget | None = None

    @property
    def name(self) -> str:
        """What people know it by."""
        if self.dictionary is not None:
            return f"dictionary {self.dictionary.tenant}/{self.dictionary.code} at {self.dictionary.url}"
        if self.flow is not None:
            return f"flow {self.flow.name} at {self.flow.url}"
        # Without the query, which may carry a token.
        return f"webhook {self.webhook.url.partition('?')[0] if self.webhook else ''}"

    @property
    def digest(self) -> str:
        """What tells it from other targets."""
        url = self.webhook.url if self.webhook else ""
        return hashlib.sha256(f"{self.name} {url}".encode()).hexdigest()[:16]

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if [self.dictionary, self.flow, self.webhook].count(None) != 2:
            raise ValueError("give a dictionary, a flow or a webhook")
        return self
