-- Version 4: what a listing shows changes with each save. `updated_at` is the time of the last save.

ALTER TABLE {schema}.sessions
    ADD COLUMN turns bigint,                     -- NULL until somebody says it
    ADD COLUMN belongs text COLLATE "C";         -- the owner's label

-- The labels that a listing shows besides, and seldom change.
CREATE TABLE {schema}.labels (
    session bigint PRIMARY KEY,
    title text,
    tags text[] COLLATE "C" NOT NULL
);

INSERT INTO {schema}.labels (session, title, tags) SELECT session, title, tags FROM {schema}.manifests;

UPDATE {schema}.sessions AS s SET turns = m.turns, belongs = m.owner
FROM {schema}.manifests AS m WHERE m.session = s.id;

-- `updated_at` in steps of 64 seconds: updates in between stay heap-only. Generated, so that it is
-- right whatever release saves.
ALTER TABLE {schema}.sessions ADD COLUMN step bigint
    GENERATED ALWAYS AS (floor(extract(epoch FROM updated_at AT TIME ZONE 'UTC') / 64)::bigint) STORED;

ALTER TABLE {schema}.manifests ALTER COLUMN tags DROP NOT NULL, ALTER COLUMN turns DROP NOT NULL;

CREATE INDEX sessions_by_use ON {schema}.sessions (tenant, step);

CREATE INDEX sessions_by_owner ON {schema}.sessions (tenant, belongs, step);
