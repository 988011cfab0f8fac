-- Times are milliseconds since 1970. Secrets are stored as hashes only.

CREATE TABLE settings (
    name TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT;

CREATE TABLE users (
    name TEXT PRIMARY KEY,
    role TEXT NOT NULL,
    -- argon2id, in PHC format
    password TEXT NOT NULL,
    created_ms INTEGER NOT NULL,
    last_login_ms INTEGER
) STRICT;

CREATE TABLE tokens (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    -- SHA-256 of the secret, which has 256 random bits
    secret BLOB NOT NULL,
    role TEXT NOT NULL,
    -- patterns of machine names, as JSON array; ["*"] is all
    machines TEXT NOT NULL,
    created_by TEXT NOT NULL,
    created_ms INTEGER NOT NULL,
    expires_ms INTEGER,
    last_used_ms INTEGER
) STRICT;

CREATE TABLE logins (
    -- SHA-256 of the cookie's secret
    secret BLOB PRIMARY KEY,
    -- shown, to revoke it
    id TEXT NOT NULL UNIQUE,
    user TEXT NOT NULL REFERENCES users(name) ON DELETE CASCADE,
    source TEXT NOT NULL,
    created_ms INTEGER NOT NULL,
    last_used_ms INTEGER NOT NULL
) STRICT;

CREATE TABLE audit (
    number INTEGER PRIMARY KEY,
    at_ms INTEGER NOT NULL,
    who TEXT NOT NULL,
    source TEXT NOT NULL,
    action TEXT NOT NULL,
    subject TEXT NOT NULL,
    result TEXT NOT NULL,
    -- SHA-256 over the hash of the entry before and this entry's fields
    hash BLOB NOT NULL
) STRICT;

CREATE TABLE answers (
    caller TEXT NOT NULL,
    key TEXT NOT NULL,
    -- SHA-256 of method, path and body
    request BLOB NOT NULL,
    status INTEGER NOT NULL,
    body TEXT NOT NULL,
    at_ms INTEGER NOT NULL,
    PRIMARY KEY (caller, key)
) STRICT;
