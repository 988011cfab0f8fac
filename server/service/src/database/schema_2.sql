-- Jobs, the queue of runs, and what became of the runs of each job.

CREATE TABLE jobs (
    name TEXT PRIMARY KEY,
    -- the document of the API, as JSON
    document TEXT NOT NULL,
    created_ms INTEGER NOT NULL,
    -- NULL: disabled, or started by hand only
    next_due_ms INTEGER
) STRICT;

CREATE TABLE queue (
    run TEXT PRIMARY KEY,
    kind TEXT NOT NULL,
    machine TEXT,
    job TEXT,
    -- the command's words after the global options, as JSON array
    arguments TEXT NOT NULL,
    requested_by TEXT,
    attempt INTEGER NOT NULL,
    due_ms INTEGER NOT NULL,
    created_ms INTEGER NOT NULL,
    -- waiting, starting, started or cancelled
    state TEXT NOT NULL,
    -- why it waits
    reason TEXT,
    -- since when another process has kept its attempts out
    busy_since_ms INTEGER
) STRICT;

CREATE TABLE outcomes (
    job TEXT NOT NULL,
    kind TEXT NOT NULL,
    -- empty for runs that concern all machines
    machine TEXT NOT NULL,
    run TEXT NOT NULL,
    state TEXT NOT NULL,
    message TEXT,
    ended_ms INTEGER NOT NULL,
    last_success_ms INTEGER,
    -- since the last success
    failures INTEGER NOT NULL,
    PRIMARY KEY (job, kind, machine)
) STRICT;
