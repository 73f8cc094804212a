-- name: post
-- The session's row is locked by now: numbers come in the order in which posts commit. What waits
-- is counted as it was before: a statement does not see what it inserts.
WITH posted AS (
    INSERT INTO {schema}.inbox (session, op, item)
    SELECT %s, p.op, p.item
    FROM unnest(%b::bytea[], %b::bytea[]) WITH ORDINALITY AS p (op, item, n) ORDER BY p.n
    ON CONFLICT (session, op) DO NOTHING
    RETURNING length(item) AS size
), waiting AS (
    SELECT length(i.item) AS size FROM {schema}.inbox AS i WHERE i.session = %s AND %s
)
SELECT p.*, w.* FROM
    (SELECT count(*), coalesce(sum(size), 0) FROM posted) AS p,
    (SELECT count(*), coalesce(sum(size), 0) FROM waiting) AS w

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
SELECT i.id, i.op, i.item FROM {schema}.inbox AS i WHERE i.session = %(id)s
ORDER BY i.id LIMIT %(limit)s

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
WITH gone AS (
    DELETE FROM {schema}.inbox WHERE session = %(id)s AND op = ANY(%(ops)b::bytea[])
)
INSERT INTO {schema}.dead_letters (session, op, letter)
SELECT %(id)s, l.op, l.letter
FROM unnest(%(dead)b::bytea[], %(letters)b::bytea[]) WITH ORDINALITY AS l (op, letter, n)
ORDER BY l.n
ON CONFLICT (session, op) DO UPDATE SET letter = EXCLUDED.letter

-- name: dead_letters
SELECT l.op, l.letter FROM {schema}.dead_letters AS l
JOIN {schema}.sessions AS s ON s.id = l.session
JOIN {schema}.tenants AS t ON t.id = s.tenant
WHERE t.name = %s AND s.agent = %s AND s.session = %s ORDER BY l.id

-- name: drop_dead_letters
DELETE FROM {schema}.dead_letters AS l USING {schema}.sessions AS s, {schema}.tenants AS t
WHERE s.id = l.session AND t.id = s.tenant
    AND t.name = %s AND s.agent = %s AND s.session = %s AND l.op = ANY(%b::bytea[])

-- name: with_dead_letters
SELECT t.name, s.agent, s.session FROM {schema}.sessions AS s
JOIN {schema}.tenants AS t ON t.id = s.tenant
WHERE EXISTS (SELECT FROM {schema}.dead_letters AS l WHERE l.session = s.id)
