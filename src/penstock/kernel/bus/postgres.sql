-- name: publish
-- Store messages in the given order, and wake the workers of their topics once.
WITH put AS (
    INSERT INTO bus_message (topic, partition, key, value, headers)
    SELECT topic, partition, key, value, headers
    FROM unnest($1::text[], $2::integer[], $3::text[], $4::bytea[], $5::jsonb[])
        WITH ORDINALITY AS given (topic, partition, key, value, headers, n)
    ORDER BY n
)
SELECT pg_notify('penstock_bus', topic) FROM (SELECT DISTINCT unnest($1::text[]) AS topic) AS topics;

-- name: declare
-- Create the partitions of a topic if they are missing.
INSERT INTO bus_partition (topic, partition)
SELECT $1, n FROM generate_series(0, $2::integer - 1) AS n
ON CONFLICT DO NOTHING;

-- name: take
-- Lease the partitions that waited longest, and read a batch from each. A suspect message is delivered alone, so that the
-- death of its worker makes no other message suspect.
WITH free AS MATERIALIZED (
    SELECT p.*
    FROM bus_partition p
    WHERE p.topic = $1 AND p.due_at <= $4 AND (p.lease_until IS NULL OR p.lease_until < $4)
      AND EXISTS (SELECT FROM bus_message m WHERE m.topic = p.topic AND m.partition = p.partition)
      -- The locked row is the present one, but messages are read as of the start of the statement: skip a partition that
      -- was claimed or settled in between, because its settled messages would be read again.
      AND p.ctid = (SELECT seen.ctid FROM bus_partition seen WHERE seen.topic = p.topic AND seen.partition = p.partition)
    ORDER BY p.taken_at
    LIMIT least($2::bigint, $6::bigint)
    FOR UPDATE SKIP LOCKED
), examined AS (
    SELECT
        free.*,
        first.id AS first_id,
        suspect.upto AS suspect,
        coalesce(first.id <= suspect.upto, false) AS is_suspect
    FROM free
    CROSS JOIN LATERAL (
        SELECT m.id FROM bus_message m WHERE m.topic = free.topic AND m.partition = free.partition ORDER BY m.id LIMIT 1
    ) AS first
    CROSS JOIN LATERAL (
        SELECT greatest(CASE WHEN free.lease_until IS NOT NULL THEN free.taken_upto END, free.suspect_upto) AS upto
    ) AS suspect
), ranked AS (
    SELECT
        examined.*,
        row_number() OVER waited AS turn,
        first_value(is_suspect) OVER waited AS suspect_is_next
    FROM examined
    WINDOW waited AS (ORDER BY taken_at, partition)
), planned AS MATERIALIZED (
    SELECT * FROM ranked WHERE CASE WHEN suspect_is_next THEN turn = 1 ELSE NOT is_suspect END
), batch AS MATERIALIZED (
    -- Fewer messages if they are large, because a batch must fit into the memory of the worker; at least one.
    SELECT planned.partition, m.id, m.key, m.value, m.headers
    FROM planned
    CROSS JOIN LATERAL (
        SELECT first.*, sum(octet_length(first.value)) OVER (ORDER BY first.id) - octet_length(first.value) AS bytes_before
        FROM (
            SELECT * FROM bus_message m
            WHERE m.topic = planned.topic AND m.partition = planned.partition
            ORDER BY m.id
            LIMIT CASE
                WHEN planned.is_suspect THEN 1
                ELSE (SELECT greatest(1, $2::bigint / count(*)) FROM planned)
            END
        ) AS first
    ) AS m
    WHERE m.bytes_before < 4000000
), claimed AS (
    UPDATE bus_partition p
    SET fence = p.fence + 1,
        holder = $3,
        lease_until = $5,
        taken_at = $4,
        taken_upto = (SELECT max(batch.id) FROM batch WHERE batch.partition = p.partition),
        suspect_upto = CASE WHEN planned.is_suspect THEN planned.suspect END,
        head = planned.first_id,
        attempts = 1 + CASE
            WHEN p.head = planned.first_id THEN p.attempts
            WHEN planned.is_suspect THEN 1
            ELSE 0
        END
    FROM planned
    WHERE p.topic = $1 AND p.partition = planned.partition
    RETURNING p.partition, p.fence, p.head, p.attempts
)
SELECT
    batch.partition, batch.id, batch.key, batch.value, batch.headers, claimed.fence,
    CASE WHEN batch.id = claimed.head THEN claimed.attempts ELSE 1 END AS attempt
FROM batch
JOIN claimed ON claimed.partition = batch.partition
ORDER BY batch.partition, batch.id;

-- name: extend
-- Extend the leases of partitions; lost partitions are skipped.
UPDATE bus_partition p
SET lease_until = $4
FROM unnest($2::integer[], $3::bigint[]) AS claim (partition, fence)
WHERE p.topic = $1 AND p.partition = claim.partition AND p.fence = claim.fence AND p.lease_until IS NOT NULL;

-- name: settle
-- End a batch: release its partitions, delete finished messages, store dead letters; only under the fence of the claim.
WITH claim AS (
    SELECT * FROM unnest($2::integer[], $3::bigint[], $4::bigint[], $5::integer[], $6::timestamptz[])
        AS claim (partition, fence, head, attempts, due_at)
), freed AS (
    UPDATE bus_partition p
    SET lease_until = NULL, holder = NULL, head = claim.head, attempts = claim.attempts,
        due_at = coalesce(claim.due_at, '-infinity')
    FROM claim
    WHERE p.topic = $1 AND p.partition = claim.partition AND p.fence = claim.fence AND p.lease_until IS NOT NULL
    RETURNING p.partition
), finished AS MATERIALIZED (
    -- One index lookup per message: otherwise the planner reads the whole topic.
    SELECT m.ctid
    FROM unnest($7::integer[], $8::bigint[]) AS done (partition, id)
    JOIN freed ON freed.partition = done.partition
    CROSS JOIN LATERAL (
        SELECT m.ctid FROM bus_message m WHERE m.topic = $1 AND m.partition = done.partition AND m.id = done.id OFFSET 0
    ) AS m
), deleted AS (
    DELETE FROM bus_message WHERE ctid = ANY (ARRAY(SELECT ctid FROM finished))
), dead_lettered AS (
    INSERT INTO bus_dead_letter (topic, key, value, headers, reason, attempts, died_at)
    SELECT m.topic, m.key, m.value, m.headers, dead.reason, dead.attempts, $13
    FROM unnest($9::integer[], $10::bigint[], $11::text[], $12::integer[]) AS dead (partition, id, reason, attempts)
    JOIN bus_message m ON m.topic = $1 AND m.partition = dead.partition AND m.id = dead.id
    WHERE m.partition IN (SELECT partition FROM freed)
    ORDER BY m.id
)
SELECT partition FROM freed;

-- name: wake
-- Wake the workers of a topic after messages were released.
SELECT pg_notify('penstock_bus', $1);

-- name: next_due
-- The time at which the next partition with messages becomes free, at the earliest now.
SELECT min(greatest(p.due_at, p.lease_until, $2))
FROM bus_partition p
WHERE p.topic = $1 AND EXISTS (SELECT FROM bus_message m WHERE m.topic = p.topic AND m.partition = p.partition);

-- name: backlog
-- The number of unsettled messages.
SELECT count(*) FROM bus_message WHERE topic = $1;

-- name: dead_letters
-- The dead letters of a topic, oldest first.
SELECT topic, key, value, headers, reason, attempts, died_at FROM bus_dead_letter WHERE topic = $1 ORDER BY id LIMIT $2;

-- name: count_dead_letters
-- The number of dead letters of a topic since a time, and the time of the oldest of them.
SELECT count(*), min(died_at) FROM bus_dead_letter WHERE topic = $1 AND died_at >= $2;
