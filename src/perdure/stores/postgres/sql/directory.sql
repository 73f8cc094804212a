-- name: sessions
-- The manifest only says whether it is damaged, and is read for the page alone.
SELECT p.*, (SELECT m.sealed FROM {schema}.manifests AS m WHERE m.session = p.id) FROM (
    SELECT s.id, s.agent, s.session, s.epoch, s.head,
        extract(epoch FROM s.created_at)::float8 AS created, {at} AS updated, s.belongs, l.title,
        l.tags, s.turns
    FROM {schema}.sessions AS s LEFT JOIN {schema}.labels AS l ON l.session = s.id
    WHERE s.tenant = (SELECT id FROM {schema}.tenants WHERE name = %(tenant)s)
        AND s.epoch > 0 AND NOT s.deleted {chosen}
    ORDER BY {order} LIMIT %(limit)s
) AS p

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
), labels AS (
    DELETE FROM {schema}.labels WHERE session = %(id)s
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
    updated_at = NULL, turns = NULL, belongs = NULL
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
