-- name: sessions
SELECT s.agent, s.session, s.epoch, s.head, extract(epoch FROM s.created_at)::float8,
    extract(epoch FROM s.updated_at)::float8, m.owner, m.title, m.tags, m.turns,
    m.sealed
FROM {schema}.tenants AS t
JOIN {schema}.sessions AS s ON s.tenant = t.id
LEFT JOIN {schema}.manifests AS m ON m.session = s.id
WHERE t.name = %(tenant)s AND s.epoch > 0 AND NOT s.deleted
    AND (s.agent, s.session) >= (%(agent)s, %(session)s)
    AND (%(with_first)s OR (s.agent, s.session) <> (%(agent)s, %(session)s))
    AND s.agent >= %(prefix)s AND starts_with(s.agent, %(prefix)s)
    AND (%(end)s::text IS NULL OR s.agent < %(end)s)
    AND (%(owner)s::text IS NULL OR m.owner = %(owner)s)
    AND (%(tag)s::text IS NULL OR %(tag)s = ANY(m.tags))
ORDER BY s.agent, s.session LIMIT %(limit)s

-- name: tenants
SELECT t.name FROM {schema}.tenants AS t
WHERE EXISTS (SELECT FROM {schema}.sessions AS s WHERE s.tenant = t.id AND NOT s.deleted)
    OR EXISTS (SELECT FROM {schema}.blobs AS b WHERE b.tenant = t.id)
    OR EXISTS (SELECT FROM {schema}.inbox AS i JOIN {schema}.sessions AS s ON s.id = i.session
        WHERE s.tenant = t.id)
ORDER BY t.name

-- name: delete
WITH log AS (
    DELETE FROM {schema}.commits WHERE session = %(id)s
), documents AS (
    DELETE FROM {schema}.documents WHERE session = %(id)s
), manifest AS (
    DELETE FROM {schema}.manifests WHERE session = %(id)s
), inbox AS (
    DELETE FROM {schema}.inbox AS i USING {schema}.sessions AS s
    WHERE i.session = %(id)s AND s.id = i.session
        AND NOT s.deleted AND NOT %(keep)s  -- deleted: it is a draft, which posts outlive
), dead_letters AS (
    DELETE FROM {schema}.dead_letters WHERE session = %(id)s
), requests AS (
    DELETE FROM {schema}.requests WHERE session = %(id)s
)
UPDATE {schema}.sessions
SET deleted = true, released = true, head = 0, crc = 0, draft = NULL, created_at = NULL,
    updated_at = NULL
WHERE id = %(id)s

-- name: wipe
-- What a draft has that is taken over.
WITH log AS (
    DELETE FROM {schema}.commits WHERE session = %(id)s
), documents AS (
    DELETE FROM {schema}.documents WHERE session = %(id)s
), manifest AS (
    DELETE FROM {schema}.manifests WHERE session = %(id)s
)
DELETE FROM {schema}.dead_letters WHERE session = %(id)s
