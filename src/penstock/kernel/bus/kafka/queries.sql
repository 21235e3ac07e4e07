-- name: store
-- Store messages in the given order until they are relayed.
INSERT INTO bus_outbox (topic, key, value, headers)
SELECT topic, key, value, headers
FROM unnest($1::text[], $2::text[], $3::bytea[], $4::jsonb[]) WITH ORDINALITY AS given (topic, key, value, headers, n)
ORDER BY n;
