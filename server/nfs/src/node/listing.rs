//! Lists a folder in parts: an NFS client asks for some kilobytes of it at a time.

use super::OpenNode;
use coldrise_block::Result;
use coldrise_export::Node;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;

/// Number of folders whose entries are kept between two parts.
const KEPT: usize = 4;
/// Time in milliseconds after which entries that are not asked for are read again.
const KEPT_MS: u64 = 2_000;

/// Cookie, name and node, sorted by cookie.
type Entries = Arc<[(u64, String, Node)]>;

/// The entries of folders that clients are reading now. Without them, each part would read the
/// whole folder, and the list of a machine's points would take time with their square.
#[derive(Default)]
pub(crate) struct Listings(Mutex<VecDeque<Listing>>);

struct Listing {
    folder_id: u64,
    used_at_ms: u64,
    entries: Entries,
}

impl OpenNode {
    /// Calls `each` with the name, the node and the cookie of the entries behind a cookie (0: all),
    /// sorted by cookie, until it returns false. Returns whether it reached the folder's end.
    /// Cookies are at least 3 and below 2^63, and stay the same over restarts.
    pub fn list(
        &self,
        after: u64,
        mut each: impl FnMut(&str, Arc<OpenNode>, u64) -> bool,
    ) -> Result<bool> {
        self.check()?;
        let kept = self.shared.listings.take(self.id(), self.shared.now_ms());
        let entries = match kept {
            Some(entries) if after != 0 => entries,
            _ => self.read_entries()?,
        };
        let first = entries.partition_point(|(cookie, ..)| *cookie <= after);
        for (cookie, name, node) in &entries[first..] {
            if !each(name, self.child(node.clone()), *cookie) {
                // Clients change the folders of sessions and must see their changes.
                if !self.is_live() {
                    self.shared.listings.keep(self.id(), self.shared.now_ms(), entries);
                }
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn read_entries(&self) -> Result<Entries> {
        let entries = self.shared.folders.entries(&self.node)?.into_iter();
        let mut entries: Vec<_> =
            entries.map(|entry| (cookie(entry.file_id), entry.name, entry.node)).collect();
        entries.sort_unstable_by_key(|(cookie, ..)| *cookie);
        Ok(entries.into())
    }
}

impl Listings {
    fn take(&self, folder_id: u64, now_ms: u64) -> Option<Entries> {
        let mut kept = self.0.lock();
        kept.retain(|listing| now_ms.saturating_sub(listing.used_at_ms) <= KEPT_MS);
        let found = kept.iter().position(|listing| listing.folder_id == folder_id)?;
        kept.remove(found).map(|listing| listing.entries)
    }

    fn keep(&self, folder_id: u64, used_at_ms: u64, entries: Entries) {
        let mut kept = self.0.lock();
        kept.truncate(KEPT - 1);
        kept.push_front(Listing { folder_id, used_at_ms, entries });
    }
}

/// Below 2^63, because some clients use signed numbers; at least 3, because NFS reserves
/// the numbers below.
fn cookie(file_id: u64) -> u64 {
    (file_id & (u64::MAX >> 1)).max(3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cookies_avoid_values_reserved_by_nfs() {
        assert_eq!([cookie(0), cookie(2), cookie(3)], [3, 3, 3]);
        assert_eq!(cookie(u64::MAX), u64::MAX >> 1);
    }
}
