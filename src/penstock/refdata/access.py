"""R25: for which tenant a caller may act."""

from penstock.kernel.http.auth import Principal
from penstock.refdata.config import TenantSection


def acts_for(caller: Principal, named: str | None, section: TenantSection) -> object:
    """Whom a token acts for: the tenant of its claim; a trusted client may name another."""
    if section.allow_header_override_for_trusted_clients and named and caller.subject in section.trusted_clients:
        return named
    return caller.claims.get(section.claim, "")
