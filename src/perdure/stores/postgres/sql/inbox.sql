-- name: post
-- The session's row is locked by now: numbers come in the order in which posts commit.
WITH posted AS (
    INSERT INTO {schema}.inbox (session, op, item)
    SELECT %s, p.op, p.item
    FROM unnest(%b::bytea[], %b::bytea[]) WITH ORDINALITY AS p (op, item, n) ORDER BY p.n
    ON CONFLICT (session, op) DO NOTHING
    RETURNING 1
)
SELECT count(*) FROM posted

-- name: tell
WITH told AS (
    INSERT INTO {schema}.requests (owner, session, mail)
    SELECT %(owner)s, %(id)s, true
    WHERE EXISTS (SELECT FROM {schema}.owners AS o WHERE o.owner = %(owner)s)
    ON CONFLICT (owner, session, mail) DO UPDATE SET id = DEFAULT
    RETURNING id
)
SELECT pg_notify(%(channel)s, '') FROM told

-- name: waiting
SELECT i.id, i.op, i.item FROM {schema}.inbox AS i WHERE i.session = %s ORDER BY i.id LIMIT %s

-- name: inboxes
-- From one inbox in which something waits to the next: the others are not looked at.
WITH RECURSIVE w (session) AS (
    SELECT min(i.session) FROM {schema}.inbox AS i
    UNION ALL
    SELECT (SELECT min(i.session) FROM {schema}.inbox AS i WHERE i.session > w.session)
    FROM w WHERE w.session IS NOT NULL
)
SELECT t.name, s.agent, s.session
FROM w JOIN {schema}.sessions AS s ON s.id = w.session
JOIN {schema}.tenants AS t ON t.id = s.tenant

-- name: settle
DELETE FROM {schema}.inbox WHERE session = %s AND op = ANY(%b::bytea[])
