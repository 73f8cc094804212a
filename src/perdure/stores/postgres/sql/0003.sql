-- Version 3: logs that begin at any number, and copies. Until a copy is published its row is also
-- marked as deleted, so that nothing reads it.

ALTER TABLE {schema}.sessions ADD COLUMN draft bytea;  -- what it is a copy of, sealed JSON
