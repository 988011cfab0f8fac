-- Servers of hypervisors, where machines are recovered.
CREATE TABLE hypervisors (
    name TEXT PRIMARY KEY,
    -- as JSON, without the password
    settings TEXT NOT NULL,
    -- the name of the file with the password, if the service keeps it
    secret TEXT,
    -- of the last test
    tested_ms INTEGER,
    is_ok INTEGER NOT NULL DEFAULT 0,
    result TEXT,
    -- what the last successful test has found, as JSON
    found TEXT
) STRICT;
