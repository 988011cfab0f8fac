//! Share reservations: what clients' opens (NFSv4) deny to each other.
//!
//! They apply to content, not to files: all images of a session's disk are one disk, so a
//! deny of writes on `vda.raw` also applies to `vda.vhdx`. The text file of a flat VMDK is
//! content of its own, as is each file of a client. An owner is bound by its own deny, too
//! (RFC 8881, 9.7).

use coldrise_export::NodeKey;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The access of an open, and what it denies to others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Share(u32);

impl Share {
    /// To read.
    pub const READ: Share = Share(1 << 0);
    /// To write.
    pub const WRITE: Share = Share(1 << 1);
    /// Deny reading to others.
    pub const DENY_READ: Share = Share(1 << 2);
    /// Deny writing to others.
    pub const DENY_WRITE: Share = Share(1 << 3);
    const ALL: [Share; 4] = [Share::READ, Share::WRITE, Share::DENY_READ, Share::DENY_WRITE];

    /// The share with these bits; ignores unknown ones.
    pub const fn of_bits(bits: u32) -> Share {
        Share(bits & 0b1111)
    }

    pub(crate) fn has(self, other: Share) -> bool {
        self.0 & other.0 == other.0
    }

    pub(crate) fn is_for_writing(self) -> bool {
        self.has(Share::WRITE)
    }

    fn denies(self) -> bool {
        self.has(Share::DENY_READ) || self.has(Share::DENY_WRITE)
    }
}

/// Another open, or an earlier one of the same owner, denies it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShareDenied;

/// The result of a check.
pub type Checked = Result<(), ShareDenied>;

impl fmt::Display for ShareDenied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a share reservation of an open denies it; it ends when that open is closed")
    }
}

/// The number of opens with each bit, in the order of [`Share::ALL`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts([u32; 4]);

impl Counts {
    fn any(&self, share: Share) -> bool {
        Share::ALL.iter().zip(self.0).any(|(bit, count)| count > 0 && *bit == share)
    }

    fn check(&self, wanted: Share) -> Checked {
        let conflicts = [
            (Share::READ, Share::DENY_READ),
            (Share::WRITE, Share::DENY_WRITE),
            (Share::DENY_READ, Share::READ),
            (Share::DENY_WRITE, Share::WRITE),
        ];
        let is_denied = conflicts.iter().any(|(want, held)| wanted.has(*want) && self.any(*held));
        if is_denied {
            return Err(ShareDenied);
        }
        Ok(())
    }

    fn add(&mut self, share: Share) {
        for (bit, count) in Share::ALL.iter().zip(&mut self.0) {
            *count += u32::from(share.has(*bit));
        }
    }

    fn take(&mut self, share: Share) {
        for (bit, count) in Share::ALL.iter().zip(&mut self.0) {
            *count = count.saturating_sub(u32::from(share.has(*bit)));
        }
    }
}

/// The reservations of all opens.
#[derive(Default)]
pub(crate) struct ShareReservations {
    of_content: Mutex<HashMap<NodeKey, Counts>>,
    /// Number of opens that deny something: if it is 0, reads and writes without an open
    /// skip the look-up.
    denying: AtomicUsize,
}

impl ShareReservations {
    /// Changes the share of an open; `held` is empty for a new one. A reduced share is
    /// always granted.
    pub(crate) fn change(&self, content: &NodeKey, held: Share, wanted: Share) -> Checked {
        let mut of_content = self.of_content.lock();
        let is_less = held.has(wanted) && held != wanted;
        if let Some(counts) = of_content.get(content).filter(|_| !is_less) {
            counts.check(wanted)?;
        }
        self.exchange(&mut of_content, content, held, wanted);
        Ok(())
    }

    /// Replaces an open's share, regardless of other opens.
    pub(crate) fn put_back(&self, content: &NodeKey, held: Share, wanted: Share) {
        self.exchange(&mut self.of_content.lock(), content, held, wanted);
    }

    fn exchange(
        &self,
        of_content: &mut HashMap<NodeKey, Counts>,
        content: &NodeKey,
        held: Share,
        wanted: Share,
    ) {
        let counts = of_content.entry(content.clone()).or_default();
        counts.take(held);
        counts.add(wanted);
        if *counts == Counts::default() {
            of_content.remove(content);
        }
        self.denying.fetch_add(usize::from(wanted.denies()), Ordering::AcqRel);
        self.denying.fetch_sub(usize::from(held.denies()), Ordering::AcqRel);
    }

    /// Whether a read or write without an open is allowed.
    pub(crate) fn check(&self, content: impl FnOnce() -> NodeKey, wanted: Share) -> Checked {
        if self.denying.load(Ordering::Acquire) == 0 {
            return Ok(());
        }
        self.of_content.lock().get(&content()).map_or(Ok(()), |counts| counts.check(wanted))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_conflicts_with_deny_in_both_directions() {
        // Read and write are the first two bits, their denies the next two.
        for held in 0..16 {
            let mut counts = Counts::default();
            counts.add(Share(held));
            for wanted in 0..16 {
                let is_denied = (wanted & 3) & (held >> 2) != 0 || (wanted >> 2) & (held & 3) != 0;
                assert_eq!(counts.check(Share(wanted)).is_err(), is_denied, "{held} {wanted}");
            }
            counts.add(Share(held));
            counts.take(Share(held));
            assert_eq!(counts.check(Share(15)).is_err(), held != 0, "one of two is left");
            counts.take(Share(held));
            assert_eq!(counts, Counts::default());
        }
    }
}
