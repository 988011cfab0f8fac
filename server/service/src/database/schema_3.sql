-- Alarms, messages and the targets that they go to. Times are milliseconds since 1970.

CREATE TABLE alarms (
    key TEXT PRIMARY KEY,
    severity TEXT NOT NULL,
    machine TEXT,
    -- the condition, as JSON
    condition TEXT NOT NULL,
    raised_ms INTEGER NOT NULL,
    -- the last message about it
    messaged_ms INTEGER NOT NULL,
    cleared_ms INTEGER,
    acknowledged_ms INTEGER,
    acknowledged_by TEXT
) STRICT;

CREATE TABLE targets (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    -- as JSON, with its secrets
    target TEXT NOT NULL,
    created_ms INTEGER NOT NULL,
    -- of the last attempt
    result_ms INTEGER,
    result TEXT,
    is_ok INTEGER NOT NULL DEFAULT 1,
    -- messages that were given up
    given_up INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE TABLE messages (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    message TEXT NOT NULL,
    at_ms INTEGER NOT NULL
) STRICT;

-- What is to be sent. A row goes when it is sent or given up.
CREATE TABLE outbox (
    target TEXT NOT NULL REFERENCES targets(id) ON DELETE CASCADE,
    message INTEGER NOT NULL REFERENCES messages(number),
    attempts INTEGER NOT NULL DEFAULT 0,
    next_ms INTEGER NOT NULL,
    PRIMARY KEY (target, message)
) STRICT;

-- Ended runs that were looked at: each leads to a message once.
CREATE TABLE ended_runs (
    id TEXT PRIMARY KEY,
    state TEXT NOT NULL,
    ended_ms INTEGER NOT NULL,
    -- of a failure, as JSON
    condition TEXT
) STRICT;

-- The file system of the repository.
CREATE TABLE space_samples (
    at_ms INTEGER PRIMARY KEY,
    used_bytes INTEGER NOT NULL,
    size_bytes INTEGER NOT NULL
) STRICT;
