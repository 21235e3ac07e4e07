-- What a user of the founding document's YAML has in the database.
CREATE TABLE mdm_country (
    tenant_id text NOT NULL,
    code text NOT NULL,
    name text NOT NULL,
    updated_at_epoch bigint NOT NULL,
    deleted boolean NOT NULL,
    PRIMARY KEY (tenant_id, code)
);

CREATE FUNCTION refdata_replace_country_snapshot(tenant text, items jsonb) RETURNS void LANGUAGE sql AS $$
    UPDATE mdm_country SET deleted = true
    WHERE tenant_id = tenant AND code NOT IN (SELECT item ->> 'key' FROM jsonb_array_elements(items) AS item);
    INSERT INTO mdm_country (tenant_id, code, name, updated_at_epoch, deleted)
    SELECT tenant, item ->> 'key', item -> 'payload' ->> 'name', (extract(epoch FROM now()) * 1000)::bigint, false
    FROM jsonb_array_elements(items) AS item
    ON CONFLICT (tenant_id, code) DO UPDATE
    SET name = excluded.name, updated_at_epoch = excluded.updated_at_epoch, deleted = false;
$$;

CREATE TABLE mdm_currency (
    tenant_id text NOT NULL,
    ccy char(3) NOT NULL,
    name text NOT NULL,
    digits int NOT NULL CHECK (digits BETWEEN 0 AND 4),
    version bigint NOT NULL,
    deleted boolean NOT NULL,
    PRIMARY KEY (tenant_id, ccy)
);

CREATE FUNCTION refdata_replace_currency_snapshot(tenant text, items jsonb) RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
    CREATE TEMP TABLE incoming ON COMMIT DROP AS
    SELECT item ->> 'key' AS ccy, item -> 'payload' ->> 'name' AS name, (item -> 'payload' ->> 'digits')::int AS digits
    FROM jsonb_array_elements(items) AS item;
    DELETE FROM mdm_currency c WHERE c.tenant_id = tenant;
    INSERT INTO mdm_currency SELECT tenant, i.ccy, i.name, i.digits, 0, false FROM incoming i;
    RETURN (SELECT count(*) FROM incoming);
END
$$;

-- Quite another harness: a schema per tenant and no tenant column, keys that are numbers or UUIDs, a view, a join.
CREATE SCHEMA acme;
CREATE SCHEMA globex;

CREATE TABLE acme.brand (id int PRIMARY KEY, label text NOT NULL);
CREATE TABLE globex.brand (LIKE acme.brand INCLUDING ALL);
CREATE TABLE acme.product (
    sku bigint PRIMARY KEY, brand_id int REFERENCES acme.brand, price numeric(12, 4) NOT NULL CHECK (price >= 0), seen timestamptz
);
CREATE TABLE globex.product (
    sku bigint PRIMARY KEY, brand_id int REFERENCES globex.brand, price numeric(12, 4) NOT NULL CHECK (price >= 0), seen timestamptz
);
INSERT INTO acme.brand VALUES (1, 'Anvil'), (2, 'Rocket');
INSERT INTO globex.brand VALUES (1, 'Umbrella');

CREATE VIEW all_products AS
SELECT 'acme' AS harness, p.sku, p.price, p.seen, b.label FROM acme.product p JOIN acme.brand b ON b.id = p.brand_id
UNION ALL
SELECT 'globex', p.sku, p.price, p.seen, b.label FROM globex.product p JOIN globex.brand b ON b.id = p.brand_id;

CREATE FUNCTION put_product(harness text, sku bigint, body jsonb, seen timestamptz) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format('INSERT INTO %I.product AS p VALUES ($1, $2, $3, $4)
                    ON CONFLICT (sku) DO UPDATE SET brand_id = $2, price = $3, seen = $4', harness)
    USING sku, (body ->> 'brand')::int, (body ->> 'price')::numeric, seen;
END
$$;

CREATE FUNCTION drop_product(harness text, key bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format('DELETE FROM %I.product WHERE sku = $1', harness) USING key;
END
$$;

CREATE TABLE incoming_product (harness text, sku bigint, body jsonb);

CREATE FUNCTION swap_products(tenant text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format('DELETE FROM %I.product', tenant);
    PERFORM put_product(harness, sku, body, now()) FROM incoming_product WHERE harness = tenant;
    DELETE FROM incoming_product WHERE harness = tenant;
END
$$;
