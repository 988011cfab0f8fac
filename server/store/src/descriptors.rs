//! The limit of open files of a process, and the database's share of it.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit of open files to the hard one. Call it before opening a repository. The
/// soft limit of 1024 is meant for programs that use select(2). A server has every file of the
/// database open, and some for each session and connection.
pub fn raise_descriptor_limit() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    // If the system refuses, the limit stays.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}

/// With at least this limit, a database keeps all of its files open: at 256 MiB each this is
/// enough for 16 TiB of chunks.
const ENOUGH_DESCRIPTORS: u64 = 65_536;
const MIN_TABLES: u64 = 16;

/// Files that a database keeps open at once; `None` for all of them. With a low limit it gets a
/// third: a backup can have a second handle of the same database, and the rest is for layers and
/// connections.
pub(crate) fn open_tables() -> Option<u64> {
    let limit = getrlimit(Resource::Nofile).current?;
    (limit < ENOUGH_DESCRIPTORS).then(|| (limit / 3).max(MIN_TABLES))
}
