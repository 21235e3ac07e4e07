-- The queries of the founding document, unchanged.

-- name: status
SELECT
  run_id,
  run_type,
  completed_workers || '/' || expected_workers AS progress,
  failed_workers,
  CASE
    WHEN completed_at IS NOT NULL THEN 'completed'
    WHEN failed_workers > 0 THEN 'failed'
    WHEN completed_workers < expected_workers THEN 'in_progress'
    ELSE 'consolidating'
  END AS status,
  started_at,
  completed_at,
  EXTRACT(EPOCH FROM (COALESCE(completed_at, NOW()) - started_at)) / 60 AS duration_minutes
FROM run_metadata
WHERE run_id = 'abc123';

-- name: worker_breakdown
SELECT
  partition_id,
  status,
  records_processed,
  error_message,
  started_at,
  completed_at
FROM worker_runs
WHERE run_id = 'abc123'
ORDER BY partition_id;

-- name: progress
SELECT
  partition_id,
  next_offset,
  completed,
  updated_at
FROM partition_progress
WHERE run_id = 'abc123'
ORDER BY partition_id;

-- name: active_runs
SELECT
  run_id,
  run_type,
  completed_workers,
  expected_workers,
  failed_workers,
  started_at,
  NOW() - started_at AS elapsed
FROM run_metadata
WHERE completed_at IS NULL
ORDER BY started_at DESC;

-- name: recent_runs
SELECT
  run_id,
  run_type,
  completed_workers || '/' || expected_workers AS progress,
  CASE
    WHEN completed_at IS NOT NULL THEN 'completed'
    WHEN failed_workers > 0 THEN 'failed'
    ELSE 'in_progress'
  END AS status,
  started_at,
  completed_at,
  EXTRACT(EPOCH FROM (COALESCE(completed_at, NOW()) - started_at)) / 60 AS duration_minutes
FROM run_metadata
WHERE started_at > NOW() - INTERVAL '24 hours'
ORDER BY started_at DESC;

-- name: failed_workers
SELECT
  wr.partition_id,
  wr.records_processed,
  wr.error_message,
  wr.started_at,
  wr.completed_at
FROM worker_runs wr
JOIN run_metadata rm ON wr.run_id = rm.run_id
WHERE rm.run_id = 'abc123'
  AND wr.status = 'failed'
ORDER BY wr.started_at;

-- name: progress_at_failure
SELECT
  partition_id,
  next_offset,
  completed
FROM partition_progress
WHERE run_id = 'abc123'
  AND NOT completed;
