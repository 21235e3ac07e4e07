-- A message is written once, read once and deleted: compressing a large value costs more than it saves.
ALTER TABLE bus_message ALTER COLUMN value SET STORAGE EXTERNAL;
ALTER TABLE bus_outbox ALTER COLUMN value SET STORAGE EXTERNAL;
