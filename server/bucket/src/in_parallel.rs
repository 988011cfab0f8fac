//! The same for many things at once: a request to an object store is mostly waiting.

use std::sync::atomic::{AtomicUsize, Ordering};

use coldrise_block::{Error, ErrorKind, Result};
use parking_lot::Mutex;

/// Does `work` for each of `items`, up to `threads` at once. The results are in the order of the items.
///
/// # Errors
/// The first error; nothing is begun after it.
pub(super) fn in_parallel<T: Sync, R: Send>(
    items: &[T],
    threads: usize,
    work: impl Fn(&T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    if let [item] = items {
        return Ok(vec![work(item)?]);
    }
    let next = AtomicUsize::new(0);
    let failed: Mutex<Option<Error>> = Mutex::new(None);
    let done = Mutex::new(Vec::with_capacity(items.len()));
    let run = || {
        while failed.lock().is_none() {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(at) else { return };
            match work(item) {
                Ok(result) => done.lock().push((at, result)),
                Err(error) => {
                    failed.lock().get_or_insert(error);
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..threads.min(items.len()) {
            scope.spawn(run);
        }
    });
    if let Some(error) = failed.into_inner() {
        return Err(error);
    }
    let mut done = done.into_inner();
    if done.len() != items.len() {
        return Err(Error::new(ErrorKind::Internal, "a thread ended early"));
    }
    done.sort_by_key(|(at, _)| *at);
    Ok(done.into_iter().map(|(_, result)| result).collect())
}
