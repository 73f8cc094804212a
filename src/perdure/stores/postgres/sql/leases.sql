-- name: add_tenant
INSERT INTO {schema}.tenants (name) VALUES (%s) ON CONFLICT (name) DO NOTHING

-- name: tenant
SELECT id FROM {schema}.tenants WHERE name = %s

-- name: add_session
INSERT INTO {schema}.sessions (tenant, agent, session) VALUES (%s, %s, %s)
ON CONFLICT (tenant, agent, session) DO NOTHING

-- name: lock_session
SELECT s.id, s.epoch, s.head, s.crc, s.begun, s.life, s.since, s.deleted, s.owner, s.released,
    s.draft
FROM {schema}.sessions AS s
WHERE s.tenant = %s AND s.agent = %s AND s.session = %s FOR NO KEY UPDATE

-- name: take
-- Only from the state that the sender knows, so it does not have to be locked beforehand.
WITH taken AS (
    UPDATE {schema}.sessions AS s
    SET epoch = %(epoch)s, owner = %(owner)s, head = %(head)s, crc = %(crc)s, begun = %(head)s,
        life = CASE WHEN %(created)s THEN %(epoch)s ELSE s.life END,
        since = CASE WHEN %(created)s THEN %(head)s ELSE s.since END,
        draft = CASE WHEN %(created)s THEN %(draft)s::bytea ELSE s.draft END,
        created_at = CASE WHEN %(created)s THEN now() ELSE s.created_at END,
        released = false, deleted = %(draft)s::bytea IS NOT NULL,
        updated_at = CASE WHEN %(created)s THEN now() ELSE s.updated_at END,
        turns = CASE WHEN %(created)s THEN %(turns)s ELSE s.turns END,
        belongs = CASE WHEN %(created)s THEN %(belongs)s::text ELSE s.belongs END
    WHERE s.id = %(id)s AND s.epoch = %(after)s AND s.head = %(was)s AND s.crc = %(sum)s
    RETURNING s.id, s.life, s.since
), added AS (
    INSERT INTO {schema}.commits (session, first, last, epoch, seed, lines)
    SELECT id, %(head)s, %(head)s, %(epoch)s, %(seed)s, %(lines)s FROM taken
), labeled AS (
    INSERT INTO {schema}.labels (session, title, tags)
    SELECT id, %(title)s, %(tags)s::text[] FROM taken WHERE %(created)s
    ON CONFLICT (session) DO UPDATE SET title = excluded.title, tags = excluded.tags
)
SELECT id, life, since FROM taken

-- name: holder
SELECT s.id, s.epoch, s.head, s.crc, s.begun, s.life, s.since, s.deleted, s.owner, s.released,
    s.draft, o.closed, o.beat, o.host, o.pid, false
FROM {schema}.tenants AS t
JOIN {schema}.sessions AS s ON s.tenant = t.id
LEFT JOIN {schema}.owners AS o ON o.owner = s.owner
WHERE t.name = %(tenant)s AND s.agent = %(agent)s AND s.session = %(session)s

-- name: begin
-- The same, and the first epoch of a session without a row; nothing at all, if it gets one meanwhile.
WITH found AS (
    SELECT s.id, s.epoch, s.head, s.crc, s.begun, s.life, s.since, s.deleted, s.owner, s.released,
        s.draft, o.closed, o.beat, o.host, o.pid, false
    FROM {schema}.tenants AS t
    JOIN {schema}.sessions AS s ON s.tenant = t.id
    LEFT JOIN {schema}.owners AS o ON o.owner = s.owner
    WHERE t.name = %(tenant)s AND s.agent = %(agent)s AND s.session = %(session)s
), known AS (
    SELECT id FROM {schema}.tenants WHERE name = %(tenant)s
), new AS (
    INSERT INTO {schema}.tenants (name)
    SELECT %(tenant)s WHERE NOT EXISTS (SELECT FROM known)
    ON CONFLICT (name) DO NOTHING
    RETURNING id
), begun AS (
    INSERT INTO {schema}.sessions AS s
        (tenant, agent, session, epoch, head, crc, begun, life, since, owner, draft, deleted,
        updated_at, created_at, turns, belongs)
    SELECT t.id, %(agent)s, %(session)s, 1, %(head)s, %(crc)s, %(head)s, 1, %(head)s, %(owner)s,
        %(draft)s::bytea, %(draft)s::bytea IS NOT NULL, now(), now(), %(turns)s,
        %(belongs)s::text
    FROM (SELECT id FROM known UNION ALL SELECT id FROM new) AS t
    WHERE NOT EXISTS (SELECT FROM found)
    ON CONFLICT (tenant, agent, session) DO NOTHING
    RETURNING s.id, s.epoch, s.head, s.crc, s.begun, s.life, s.since, s.deleted, s.owner,
        s.released, s.draft
), added AS (
    INSERT INTO {schema}.commits (session, first, last, epoch, seed, lines)
    SELECT id, %(head)s, %(head)s, 1, 0, %(lines)s FROM begun
), labeled AS (
    INSERT INTO {schema}.labels (session, title, tags)
    SELECT id, %(title)s, %(tags)s::text[] FROM begun
)
SELECT * FROM found
UNION ALL
SELECT b.*, false, 0::bigint, '', 0::bigint, true FROM begun AS b

-- name: publish
UPDATE {schema}.sessions AS s SET deleted = false
FROM {schema}.tenants AS t
WHERE t.name = %s AND s.tenant = t.id AND s.agent = %s AND s.session = %s AND s.epoch = %s
    AND (NOT s.deleted OR s.draft IS NOT NULL)
RETURNING s.id

-- name: drafts
SELECT s.agent, s.session, s.epoch, s.draft, s.owner
FROM {schema}.tenants AS t JOIN {schema}.sessions AS s ON s.tenant = t.id
WHERE t.name = %s AND s.deleted AND s.draft IS NOT NULL
ORDER BY s.agent, s.session

-- name: release
UPDATE {schema}.sessions AS s SET released = true
FROM {schema}.tenants AS t
WHERE t.name = %s AND s.tenant = t.id AND s.agent = %s AND s.session = %s AND s.epoch = %s
    AND NOT s.released

-- name: enter
-- Owners are forgotten a week after their last heartbeat, with what was asked of them.
WITH forgotten AS (
    DELETE FROM {schema}.owners WHERE seen < now() - interval '7 days' AND owner <> %(owner)s
    RETURNING owner
), unheard AS (
    DELETE FROM {schema}.requests AS r USING forgotten AS f WHERE r.owner = f.owner
)
INSERT INTO {schema}.owners (owner, beat, seen, host, pid)
VALUES (%(owner)s, %(first)s, now(), %(host)s, %(pid)s)
ON CONFLICT (owner) DO UPDATE SET beat = owners.beat + 1, seen = now(), closed = false,
    host = excluded.host, pid = excluded.pid

-- name: leave
UPDATE {schema}.owners SET closed = true WHERE owner = %s

-- name: beat
-- What was reported before goes, by its number: asked again since then, it has another. Then the
-- counters of others, without a query of their own.
WITH beat AS (
    INSERT INTO {schema}.owners (owner, beat, seen, host, pid)
    VALUES (%(owner)s, %(first)s, now(), %(host)s, %(pid)s)
    ON CONFLICT (owner) DO UPDATE SET beat = owners.beat + 1, seen = now(), closed = false
), heard AS (
    DELETE FROM {schema}.requests WHERE owner = %(owner)s AND id = ANY(%(heard)s::bigint[])
)
SELECT r.id, r.mail, t.name, s.agent, s.session, s.owner = %(owner)s AND NOT s.released
FROM {schema}.requests AS r
JOIN {schema}.sessions AS s ON s.id = r.session
JOIN {schema}.tenants AS t ON t.id = s.tenant
WHERE r.owner = %(owner)s AND NOT r.id = ANY(%(heard)s::bigint[])
UNION ALL
(SELECT o.beat, NULL, o.owner, NULL, NULL, NULL
FROM {schema}.owners AS o
WHERE o.owner <> %(owner)s AND NOT o.closed
ORDER BY o.seen DESC LIMIT 1000)
ORDER BY 1

-- name: ask
WITH asked AS (
    INSERT INTO {schema}.requests (owner, session, mail)
    SELECT %(owner)s, s.id, false
    FROM {schema}.tenants AS t JOIN {schema}.sessions AS s ON s.tenant = t.id
    WHERE t.name = %(tenant)s AND s.agent = %(agent)s AND s.session = %(session)s
        AND EXISTS (SELECT FROM {schema}.owners AS o WHERE o.owner = %(owner)s)
    ON CONFLICT (owner, session, mail) DO UPDATE SET id = DEFAULT
    RETURNING id
)
SELECT pg_notify(%(channel)s, '') FROM asked
