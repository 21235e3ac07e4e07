"""R1: the configured dictionaries. They can be replaced at run time; a running operation keeps the one that it has."""

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.kernel.errors import Invalid, NotFound
from penstock.refdata.config import DictionarySection, RefdataSection
from penstock.refdata.dictionaries.provider import DictionaryProvider, make_provider, read_only_error
from penstock.refdata.model import DictionaryKey


@dataclass(frozen=True)
class Dictionary:
    """A configured dictionary with its provider."""

    section: DictionarySection
    provider: DictionaryProvider

    @property
    def is_writable(self) -> bool:
        """Return whether commands can change the dictionary."""
        return self.section.load_sql is None or self.section.apply is not None


class DictionaryCatalogue:
    """All dictionaries and tenants of the configuration."""

    def __init__(self, section: RefdataSection) -> None:
        self.replace(section)

    def replace(self, section: RefdataSection) -> None:
        """Replace the configuration, all of it at once."""
        # Unchanged dictionaries stay the same object, with the cached plans of their statements.
        current = getattr(self, "_dictionaries", {})
        dictionaries: dict[str, Dictionary] = {}
        for dictionary in section.dictionaries:
            same = current.get(dictionary.code)
            dictionaries[dictionary.code] = (
                same if same and same.section == dictionary else Dictionary(dictionary, make_provider(dictionary))
            )
        self._dictionaries: Mapping[str, Dictionary] = dictionaries
        self._tenants = None if section.tenants is None else frozenset(section.tenants)

    @property
    def tenants(self) -> frozenset[str]:
        """Return the configured tenants; empty if any tenant is allowed."""
        return self._tenants or frozenset()

    def list_all(self) -> list[Dictionary]:
        """Return all dictionaries, also disabled ones."""
        return list(self._dictionaries.values())

    def list_codes(self, tenant_id: str) -> list[str]:
        """Return the codes of the enabled dictionaries of a tenant, sorted; NotFound for an unknown tenant."""
        self._check_tenant(tenant_id)
        return sorted(code for code, dictionary in self._dictionaries.items() if dictionary.section.enabled)

    def get(self, target: DictionaryKey) -> Dictionary:
        """Return the dictionary of a tenant, or raise an error that names the missing setting."""
        self._check_tenant(target.tenant_id)
        dictionary = self._dictionaries.get(target.dict_code)
        if dictionary is None:
            hint = "check the code, or add the dictionary to refdata.dictionaries"
            raise NotFound("UNKNOWN_DICTIONARY", f"there is no dictionary {target.dict_code!r}", hint=hint)
        if not dictionary.section.enabled:
            hint = "set `enabled: true` for the dictionary in refdata.dictionaries"
            raise Invalid("DICTIONARY_DISABLED", f"dictionary {target.dict_code} is disabled", hint=hint)
        return dictionary

    def _check_tenant(self, tenant_id: str) -> None:
        if self._tenants is not None and tenant_id not in self._tenants:
            hint = "check the name, or add the tenant to refdata.tenants"
            raise NotFound("UNKNOWN_TENANT", f"there is no tenant {tenant_id!r}", hint=hint)

    def get_writable(self, target: DictionaryKey) -> Dictionary:
        """Return the dictionary of a tenant, or raise an error if commands cannot change it."""
        dictionary = self.get(target)
        if not dictionary.is_writable:
            raise read_only_error(target.dict_code)
        return dictionary
