-- Every statement that the store sends, by name. Values are bound, never written in.

-- name: session
SELECT id, tenant, agent, session, epoch, born, owner, state, start, low, head, crc, sum
FROM session WHERE id = :id

-- name: opening
-- All that is in one row each of what an open reads, as one statement.
SELECT s.id, s.tenant, s.agent, s.session, s.epoch, s.born, s.owner, s.state, s.start, s.low,
       s.head, s.crc, s.sum,
       m.data, EXISTS (SELECT 1 FROM inbox WHERE inbox.session = s.id)
FROM session AS s LEFT JOIN manifest AS m ON m.session = s.id WHERE s.id = :id

-- name: numbers
-- All that has a row or a log. Names as bytes, so that damaged text hides no other row.
SELECT n.id, CAST(s.tenant AS BLOB), CAST(s.agent AS BLOB), CAST(s.session AS BLOB), m.data
FROM (SELECT id FROM session UNION SELECT session FROM log) AS n
LEFT JOIN session AS s ON s.id = n.id LEFT JOIN manifest AS m ON m.session = n.id

-- name: beside
-- What `opening` has beside a session's row, without it.
SELECT (SELECT data FROM manifest WHERE session = :id),
       EXISTS (SELECT 1 FROM inbox WHERE session = :id)

-- name: log_exists
SELECT 1 FROM log WHERE session = :id LIMIT 1

-- name: insert_session
INSERT INTO session (id, tenant, agent, session, epoch, born, owner, state, start, low, head, crc,
                     sum, created_at, updated_at)
VALUES (:id, :tenant, :agent, :session, :epoch, :born, :owner, :state, :start, :low, :head, :crc,
        :sum, :now, :now)

-- name: update_session
UPDATE session SET epoch = :epoch, born = :born, owner = :owner, state = :state, start = :start,
       low = :low, head = :head, crc = :crc, sum = :sum
WHERE id = :id

-- name: created_now
UPDATE session SET created_at = :now, updated_at = :now, step = CAST(:now / 64 AS INTEGER),
       turns = :turns, user = :user, labels = :labels, tags = :tags
WHERE id = :id

-- A save is a row of this view: its session's head is moved, and the records go after it, only
-- where the log still ends as its holder knows. A row without an id is nothing. View and trigger are
-- temporary, which is to say the writing connection's own, and so no part of the database's format.

-- name: make_save
CREATE TEMP VIEW save AS
SELECT 0 AS id, 0 AS epoch, 0 AS was, 0 AS seed, 0 AS had, 0 AS head, 0 AS crc, 0 AS sum,
       0.0 AS now, x'' AS data, 0 AS turns, 0 AS step

-- name: do_save
CREATE TEMP TRIGGER do_save INSTEAD OF INSERT ON save WHEN NEW.id IS NOT NULL
BEGIN
    UPDATE session SET head = NEW.head, crc = NEW.crc, sum = NEW.sum, updated_at = NEW.now,
           turns = ifnull(NEW.turns, turns)
    WHERE id = NEW.id AND epoch = NEW.epoch AND head = NEW.was AND sum = NEW.had;
    SELECT RAISE(ABORT, 'the log does not end there') WHERE changes() <> 1;
    INSERT INTO log (session, first, last, epoch, seed, data)
    VALUES (NEW.id, NEW.was + 1, NEW.head, NEW.epoch, NEW.seed, NEW.data);
END

-- name: do_step
CREATE TEMP TRIGGER do_step INSTEAD OF INSERT ON save WHEN NEW.step IS NOT NULL
BEGIN
    UPDATE session SET step = CAST(NEW.step AS INTEGER) WHERE id = NEW.id;
END

-- name: save
INSERT INTO save (id, epoch, was, seed, had, head, crc, sum, now, data, turns, step)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: label
UPDATE session SET user = :user, labels = :labels, tags = :tags WHERE id = :id

-- name: append
INSERT INTO log (session, first, last, epoch, seed, data) VALUES (?, ?, ?, ?, ?, ?)

-- name: rows_from
SELECT first, last, epoch, seed, data FROM log
WHERE session = :id AND first >= ifnull(
    (SELECT max(first) FROM log WHERE session = :id AND first <= :low), 0)
ORDER BY first

-- name: rows_back
SELECT first, last, epoch, seed, data FROM log
WHERE session = :id AND first <= :high
ORDER BY first DESC

-- name: rows_below
SELECT count(*), max(last), sum(length(data)) FROM log WHERE session = :id AND last < :below

-- name: trim
DELETE FROM log WHERE session = :id AND last < :below

-- name: delete_log
DELETE FROM log WHERE session = :id

-- name: put_manifest
INSERT OR REPLACE INTO manifest (session, data, tags) VALUES (:id, :data, '')

-- name: list_manifest
-- What a fold says to a listing, where no save has said as much.
UPDATE session SET turns = :turns, user = :user, labels = :labels, tags = :tags
WHERE id = :id AND (turns IS NULL OR head <= :as_of)

-- name: delete_listed
UPDATE session SET turns = NULL, user = NULL, labels = NULL, tags = NULL WHERE id = :id

-- name: delete_manifest
DELETE FROM manifest WHERE session = :id

-- name: document_names
SELECT name FROM document WHERE session = :id

-- name: documents
-- Names as bytes, so that damaged text in one row does not hide the others.
SELECT CAST(name AS BLOB), data FROM document WHERE session = ?

-- name: documents_named
SELECT CAST(name AS BLOB), data FROM document WHERE session = ? AND name IN ({marks})

-- name: put_document
INSERT INTO document (session, name, data) VALUES (?, ?, ?)
ON CONFLICT (session, name) DO UPDATE SET data = excluded.data

-- name: delete_document
DELETE FROM document WHERE session = ? AND name = ?

-- name: delete_documents
DELETE FROM document WHERE session = :id

-- name: put_blob
INSERT INTO blob (tenant, name, renewed_at, data) VALUES (?, ?, ?, ?)
ON CONFLICT (tenant, name) DO UPDATE SET
    renewed_at = max(renewed_at, excluded.renewed_at), moved_at = NULL, data = excluded.data

-- name: blob
SELECT data FROM blob WHERE tenant = :tenant AND name = :name

-- name: blobs
SELECT name, renewed_at, moved_at, length(data) FROM blob WHERE tenant = :tenant

-- name: renew_blob
UPDATE blob SET renewed_at = max(renewed_at, :now), moved_at = NULL
WHERE tenant = :tenant AND name = :name

-- name: move_blob
UPDATE blob SET moved_at = ? WHERE tenant = ? AND name = ?

-- name: delete_blob
DELETE FROM blob WHERE tenant = ? AND name = ?

-- name: blob_names
SELECT name FROM blob WHERE tenant = :tenant ORDER BY name

-- name: blobs_size
SELECT coalesce(sum(length(data)), 0) FROM blob
WHERE tenant = :tenant AND name IN (SELECT value FROM json_each(:names))

-- name: delete_blobs
DELETE FROM blob WHERE tenant = :tenant AND name IN (SELECT value FROM json_each(:names))

-- name: put_draft
INSERT OR REPLACE INTO draft (session, data) VALUES (:id, :data)

-- name: draft
SELECT data FROM draft WHERE session = :id

-- name: delete_draft
DELETE FROM draft WHERE session = :id

-- name: drafts
SELECT tenant, agent, session FROM session
WHERE tenant = :tenant AND epoch > 0 AND state & 4 ORDER BY agent, session

-- name: post
INSERT OR IGNORE INTO inbox (session, op_id, kind, payload, posted_at, sum)
VALUES (?, ?, ?, ?, ?, ?)

-- name: inbox
-- As bytes, so that damaged text in one row does not hide the others.
SELECT id, CAST(op_id AS BLOB), CAST(kind AS BLOB), CAST(payload AS BLOB), posted_at, sum
FROM inbox WHERE session = :id ORDER BY id LIMIT :limit

-- name: inbox_size
SELECT count(*), coalesce(sum(length(payload)), 0) FROM inbox WHERE session = :id

-- name: waiting
SELECT tenant, agent, session FROM session AS s
WHERE EXISTS (SELECT 1 FROM inbox WHERE inbox.session = s.id)

-- name: settle
DELETE FROM inbox WHERE session = ? AND op_id = ?

-- name: settle_row
DELETE FROM inbox WHERE session = ? AND id = ?

-- name: delete_inbox
DELETE FROM inbox WHERE session = :id

-- name: put_dead_letter
INSERT OR REPLACE INTO dead_letter (session, op_id, data) VALUES (?, ?, ?)

-- name: dead_letters
SELECT CAST(op_id AS BLOB), CAST(data AS BLOB) FROM dead_letter WHERE session = :id ORDER BY rowid

-- name: drop_dead_letter
DELETE FROM dead_letter WHERE session = ? AND op_id = ?

-- name: delete_dead_letters
DELETE FROM dead_letter WHERE session = :id

-- name: with_dead_letters
SELECT tenant, agent, session FROM session AS s
WHERE EXISTS (SELECT 1 FROM dead_letter WHERE dead_letter.session = s.id)

-- name: put_owner
INSERT INTO owner (id, beat, host, pid) VALUES (:owner, :beat, :host, :pid)
ON CONFLICT (id) DO UPDATE SET beat = excluded.beat, host = excluded.host, pid = excluded.pid

-- name: owner
SELECT beat, host, pid FROM owner WHERE id = :owner

-- name: owners
SELECT id FROM owner

-- name: beats
SELECT id, beat FROM owner WHERE id <> :owner LIMIT 1000

-- name: beat
UPDATE owner SET beat = beat + 1 WHERE id = :owner

-- name: delete_owner
DELETE FROM owner WHERE id = :owner

-- name: send_letter
INSERT OR REPLACE INTO letter (owner, session, mail) VALUES (:owner, :id, :mail)

-- name: letters
SELECT letter.id, letter.mail, session.tenant, session.agent, session.session
FROM letter JOIN session ON session.id = letter.session
WHERE letter.owner = :owner AND letter.id > :told ORDER BY letter.id

-- name: delete_letters
DELETE FROM letter WHERE owner = :owner AND id <= :told

-- name: delete_all_letters
DELETE FROM letter WHERE owner = :owner

-- name: sessions
-- The manifest only says whether it is damaged, and is read for the page alone.
SELECT p.*, (SELECT data FROM manifest WHERE manifest.session = p.id)
FROM (SELECT id, agent, session, epoch, head, created_at, updated_at, turns, labels
      FROM session INDEXED BY {index}
      WHERE {chosen} AND epoch > 0 AND state & 6 = 0 ORDER BY {order} LIMIT :limit) AS p

-- name: keys_from_the_first
SELECT tenant, agent, session, epoch, state FROM session NOT INDEXED ORDER BY id

-- name: keys_from_the_last
SELECT tenant, agent, session, epoch, state FROM session NOT INDEXED ORDER BY id DESC

-- name: tenants
SELECT tenant FROM session AS s WHERE (epoch > 0 AND state & 6 = 0)
   OR EXISTS (SELECT 1 FROM inbox WHERE inbox.session = s.id)
UNION SELECT tenant FROM blob ORDER BY 1
