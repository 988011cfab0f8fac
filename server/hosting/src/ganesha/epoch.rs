//! The number of a server instance. nfs-ganesha derives its write verifier from it.
//!
//! If the verifier changes, a client sends its unflushed writes again. So no two instances
//! may have the same number, even if the clock is wrong; and the low 32 bits, which
//! identify NFSv4's clients, may not repeat either. The number is the clock's seconds or
//! the previous number plus one, whichever is greater. All instances share the repository,
//! which stores the number durably before an instance starts.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use coldrise_block::{Context, Error, ErrorKind, Result, replace_file};
use coldrise_store::lock_repository;

/// Name of the file in the repository's directory: the last number, in decimal.
const FILE: &str = "nfs-epoch";

/// The next number, durable when this returns.
///
/// # Errors
/// `Corrupt` if the file holds no number: then the previous one is unknown.
pub(super) fn next(repository: &Path) -> Result<u64> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    next_at(repository, now.as_secs())
}

fn next_at(repository: &Path, now_s: u64) -> Result<u64> {
    // Two servers that start at the same time get two numbers.
    let _lock = match lock_repository(repository, "another NFS server takes its number") {
        // The repository is read-only, so no client depends on a server's unflushed writes.
        Err(error) if error.kind() == ErrorKind::ReadOnly => return Ok(now_s),
        locked => locked?,
    };
    let path = repository.join(FILE);
    let last = match std::fs::read_to_string(&path) {
        Ok(text) => text.trim().parse::<u64>().map_err(|error| {
            let what = format!(
                "{} holds no number; write into it one that is greater than all it has held, such \
                 as the time in seconds since 1970",
                path.display()
            );
            Error::with_source(ErrorKind::Corrupt, what, error)
        })?,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => 0,
        Err(error) => return Err(error).context(|| format!("reading {}", path.display())),
    };
    let epoch = now_s.max(last.saturating_add(1));
    replace_file(&path, format!("{epoch}\n").as_bytes())?;
    Ok(epoch)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_grow_whatever_the_clock_says() {
        let folder = tempfile::tempdir().unwrap();
        let next = |now_s| next_at(folder.path(), now_s).unwrap();
        assert_eq!(next(1_000), 1_000);
        assert_eq!(next(1_000), 1_001, "within a second");
        assert_eq!(next(10), 1_002, "the clock was set back");
        assert_eq!(next(2_000), 2_000);
        std::fs::write(folder.path().join(FILE), "").unwrap();
        assert_eq!(next_at(folder.path(), 3_000).unwrap_err().kind(), ErrorKind::Corrupt);
    }

    #[test]
    fn servers_that_start_at_once_get_different_numbers() {
        let folder = tempfile::tempdir().unwrap();
        let mut numbers: Vec<u64> = std::thread::scope(|scope| {
            let starts: Vec<_> =
                (0..8).map(|_| scope.spawn(|| next_at(folder.path(), 5).unwrap())).collect();
            starts.into_iter().map(|start| start.join().unwrap()).collect()
        });
        numbers.sort_unstable();
        assert_eq!(numbers, (5..13).collect::<Vec<_>>());
    }
}
