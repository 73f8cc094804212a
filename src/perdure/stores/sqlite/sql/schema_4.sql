-- Format 4: what a listing shows is in the session's own row, and changes with each save.
-- `updated_at` is the time of the last save from now on.

ALTER TABLE session ADD COLUMN user TEXT;      -- the owner's label
ALTER TABLE session ADD COLUMN labels TEXT;    -- JSON
ALTER TABLE session ADD COLUMN tags TEXT;      -- JSON, as they are compared
ALTER TABLE session ADD COLUMN turns INTEGER;  -- NULL until somebody says it
-- `updated_at` in steps of 64 seconds: an index of it is written that seldom.
ALTER TABLE session ADD COLUMN step INTEGER NOT NULL DEFAULT 0;

UPDATE session SET step = CAST(updated_at / 64 AS INTEGER);

UPDATE session SET (user, tags, labels, turns) = (
    SELECT owner, tags, json_extract(CAST(data AS TEXT), '$.about'),
           json_extract(CAST(data AS TEXT), '$.counters.turns')
    FROM manifest WHERE manifest.session = session.id)
WHERE EXISTS (SELECT 1 FROM manifest
              WHERE manifest.session = session.id AND json_valid(CAST(data AS TEXT)));

CREATE INDEX session_by_use ON session (tenant, step);

CREATE INDEX session_by_user ON session (tenant, user, step);
