-- Retained versions of dictionaries, which can be pinned or restored.

CREATE TABLE retained_version (
    tenant_id text NOT NULL,
    dict_code text NOT NULL,
    version bigint NOT NULL,
    items integer NOT NULL,
    retained_at timestamptz NOT NULL,
    is_dropped boolean NOT NULL DEFAULT false,  -- its items are being deleted
    PRIMARY KEY (tenant_id, dict_code, version)
);

CREATE TABLE retained_item (
    tenant_id text NOT NULL,
    dict_code text NOT NULL,
    version bigint NOT NULL,
    item_key text NOT NULL,
    payload jsonb NOT NULL,
    PRIMARY KEY (tenant_id, dict_code, version, item_key)
);

-- The retained version that readers get instead of the last version, until it is unpinned.
CREATE TABLE dictionary_pin (
    tenant_id text NOT NULL,
    dict_code text NOT NULL,
    version bigint NOT NULL,
    pinned_at timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, dict_code),
    FOREIGN KEY (tenant_id, dict_code, version) REFERENCES retained_version
);
