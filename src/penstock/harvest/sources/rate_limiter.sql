-- name: insert_feed
-- Insert the row of a feed before its first request.
INSERT INTO harvest_feed (feed) VALUES ($1) ON CONFLICT DO NOTHING;

-- name: read_state
-- The state of the feed.
SELECT paused_until, pause_reason, failures, breaks, probed_at FROM harvest_feed WHERE feed = $1;

-- name: take_slots
-- Take slots for up to $3 requests, at intervals of $4, none later than $5 (which is ahead of the last slot by the burst), and
-- return the state of the feed. `first` is the theoretical time of the first slot.
WITH feed AS (
    SELECT f.feed, greatest(f.next_slot, $2) AS first FROM harvest_feed f WHERE f.feed = $1 FOR UPDATE
), taken AS (
    SELECT feed, first, least($3::integer, greatest(0,
        floor(extract(epoch FROM $5::timestamptz - first) / extract(epoch FROM $4::interval))::integer + 1)) AS slots
    FROM feed
)
UPDATE harvest_feed f
SET next_slot = taken.first + taken.slots * $4::interval
FROM taken
WHERE f.feed = taken.feed
RETURNING taken.first, taken.slots, f.paused_until, f.pause_reason, f.failures, f.breaks, f.probed_at;

-- name: record_pause
-- The source requested a pause until $2. It answers, so the failures end, and the probe ($4) closes the breaker. A pause is
-- never shortened.
UPDATE harvest_feed
SET paused_until = greatest(paused_until, $2), pause_reason = $3, failures = 0,
    breaks = CASE WHEN probed_at = $4 THEN 0 ELSE breaks END, probed_at = nullif(probed_at, $4)
WHERE feed = $1
RETURNING paused_until, pause_reason, failures, breaks, probed_at;

-- name: record_failure
-- Count a failure. The $3-th in a row, or a failed probe ($6), stops all requests for $5, doubled each time, up to four times
-- $5. Requests that are running when the breaker opens change nothing.
WITH feed AS (
    SELECT f.feed, f.breaks > 0 OR f.failures + 1 >= $3::integer AS opens FROM harvest_feed f
    WHERE f.feed = $1 AND (f.breaks = 0 OR f.probed_at = $6)
    FOR UPDATE
)
UPDATE harvest_feed f
SET failures = f.failures + 1, breaks = f.breaks + opens::integer, probed_at = nullif(f.probed_at, $6),
    paused_until = CASE WHEN opens THEN greatest(f.paused_until, $2::timestamptz + $5::interval * 2 ^ least(f.breaks, 2))
                        ELSE f.paused_until END,
    pause_reason = CASE WHEN opens THEN $4 ELSE f.pause_reason END
FROM feed
WHERE f.feed = feed.feed
RETURNING f.paused_until, f.pause_reason, f.failures, f.breaks, f.probed_at;

-- name: record_success
-- A success ends a row of failures. A request that was running when the breaker opened does not close it.
UPDATE harvest_feed
SET failures = 0, breaks = 0, probed_at = NULL
WHERE feed = $1 AND (probed_at = $2 OR (breaks = 0 AND failures > 0))
RETURNING paused_until, pause_reason, failures, breaks, probed_at;

-- name: claim_probe
-- One request of all processes may test whether the source is available again; it has $3 to report.
UPDATE harvest_feed
SET probed_at = $2
WHERE feed = $1 AND breaks > 0 AND paused_until <= $2 AND (probed_at IS NULL OR probed_at + $3::interval <= $2)
RETURNING paused_until, pause_reason, failures, breaks, probed_at;

-- name: release_probe
-- The probe was cancelled: another request may probe.
UPDATE harvest_feed SET probed_at = NULL WHERE feed = $1 AND probed_at = $2;
