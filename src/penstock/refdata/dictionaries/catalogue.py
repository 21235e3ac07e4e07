"""R1: the dictionaries in force. They may be replaced while everything runs; who holds one keeps it to the end."""

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.kernel.errors import Invalid, NotFound
from penstock.refdata.config import DictionarySection, RefdataSection
from penstock.refdata.dictionaries.provider import DictionaryProvider, make_provider, read_only_error
from penstock.refdata.model import DictionaryKey


@dataclass(frozen=True)
class Dictionary:
    """One dictionary as it is configured."""

    section: DictionarySection
    provider: DictionaryProvider

    @property
    def is_writable(self) -> bool:
        return self.section.load_sql is None or self.section.apply is not None


class DictionaryCatalogue:
    """All dictionaries, and the tenants that may have them."""

    def __init__(self, section: RefdataSection) -> None:
        self.replace(section)

    def replace(self, section: RefdataSection) -> None:
        """Take over another configuration, all of it at once."""
        # What did not change is kept, with the plans PostgreSQL keeps for its statements.
        known = getattr(self, "_dictionaries", {})
        made: dict[str, Dictionary] = {}
        for dictionary in section.dictionaries:
            same = known.get(dictionary.code)
            made[dictionary.code] = (
                same if same and same.section == dictionary else Dictionary(dictionary, make_provider(dictionary))
            )
        self._dictionaries: Mapping[str, Dictionary] = made
        self._tenants = None if section.tenants is None else frozenset(section.tenants)

    @property
    def tenants(self) -> frozenset[str]:
        """All tenants, where they are named."""
        return self._tenants or frozenset()

    def all(self) -> list[Dictionary]:
        return list(self._dictionaries.values())

    def list_codes(self, tenant_id: str) -> list[str]:
        """Return the codes of the enabled dictionaries of a tenant, sorted; NotFound for an unknown tenant."""
        self._check_tenant(tenant_id)
        return sorted(code for code, dictionary in self._dictionaries.items() if dictionary.section.enabled)

    def get(self, target: DictionaryKey) -> Dictionary:
        """The dictionary of a tenant, or why there is none."""
        self._check_tenant(target.tenant_id)
        found = self._dictionaries.get(target.dict_code)
        if found is None:
            hint = "add it to refdata.dictionaries"
            raise NotFound("UNKNOWN_DICTIONARY", f"there is no dictionary {target.dict_code!r}", hint=hint)
        if not found.section.enabled:
            hint = "set `enabled: true`"
            raise Invalid("DICTIONARY_DISABLED", f"{target.dict_code} is not enabled", hint=hint)
        return found

    def _check_tenant(self, tenant_id: str) -> None:
        if self._tenants is not None and tenant_id not in self._tenants:
            hint = "add it to refdata.tenants"
            raise NotFound("UNKNOWN_TENANT", f"there is no tenant {tenant_id!r}", hint=hint)

    def get_writable(self, target: DictionaryKey) -> Dictionary:
        """The dictionary of a tenant, or why it cannot be changed."""
        found = self.get(target)
        if not found.is_writable:
            raise read_only_error(target.dict_code)
        return found
