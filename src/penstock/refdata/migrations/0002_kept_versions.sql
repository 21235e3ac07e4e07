-- Versions of dictionaries that are kept, to be pinned or gone back to.

CREATE TABLE kept_version (
    tenant_id text NOT NULL,
    dict_code text NOT NULL,
    version bigint NOT NULL,
    items integer NOT NULL,
    kept_at timestamptz NOT NULL,
    is_going boolean NOT NULL DEFAULT false,  -- its items are being removed
    PRIMARY KEY (tenant_id, dict_code, version)
);

CREATE TABLE kept_item (
    tenant_id text NOT NULL,
    dict_code text NOT NULL,
    version bigint NOT NULL,
    item_key text NOT NULL,
    payload jsonb NOT NULL,
    PRIMARY KEY (tenant_id, dict_code, version, item_key)
);

-- What readers get in place of the last version, until it is taken away.
CREATE TABLE dictionary_pin (
    tenant_id text NOT NULL,
    dict_code text NOT NULL,
    version bigint NOT NULL,
    pinned_at timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, dict_code),
    FOREIGN KEY (tenant_id, dict_code, version) REFERENCES kept_version
);
