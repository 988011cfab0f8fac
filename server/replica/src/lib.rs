//! Copies of restore points in another repository.
//!
//! ```text
//!   point and base ─▶ PointChanges ─▶ store_source ─┬▶ SharedWriter of the remote repository
//!   (here)            what differs     reads ahead   │  chunks, dedup, encryption of its own
//!                                                   ├▶ BucketFar ─▶ packs in an object store
//!                                                   └▶ LineFar ══ line ══▶ Receiver ─▶ SharedWriter
//! ```
//!
//! Who dials is the source (copy --to) or the receiver (copy --from): the same two loops, with an opening in front that says which.
//!
//! A copy is a backup whose source is a point: the remote repository stores the content in chunks of its own size,
//! compressed and encrypted its own way, and finds what it has already. Only what differs from a point that both
//! have is read.
//!
//! # Invariants
//!
//! 1. A copied point is visible only when it is complete: its document is the last thing stored.
//! 2. Two points are the same if they were made in the same repository, for the same machine, under the same name, at
//!    the same time ([`Identity`]). Points never change, so their content is the same. Only such a pair is a base.
//! 3. A point goes out with the base that it was compared with: both are leased here, the base's data is leased there.
//! 4. Nothing at the remote side is removed or replaced. A point of the same name that is another one is an error.
//! 5. Points that the remote side has retired are not copied again: without `--all`, only points younger than the youngest one
//!    that it has.
//!
//! # Crashes
//!
//! A copy that is killed leaves whole points and stored chunks without a point. The next copy continues at the first
//! point that is not there, and finds those chunks by their content. A gc at the remote side may remove them first; then they
//! are stored again. If the process that holds the remote side's writer is killed, the copy becomes the writer and
//! plans the machine again.

mod attempts;
mod bucket;
mod changes;
mod content;
mod copy;
mod disk_copy;
mod links;
mod live_sender;
mod plan;
mod remote;
mod serve_fetch;
mod source;
mod status;
mod windows;

pub use attempts::{Attempts, Site, Way, copy_over, paced};
pub use bucket::{BucketRemote, fetch_from_bucket};
pub use copy::{CopyRequest, copy};
pub use links::{Invitation, Link, Links, Right, parse_link_name, parse_prefix};
pub use live_sender::{LiveProgress, LiveRequest, LiveStep, send_live};
pub use plan::Identity;
pub use remote::{
    Announced, AnnouncedDisk, Announcement, CopiedPoint, CopyProgress, CopyStep, CopySummary,
    FetchRequest, Fetched, Greeting, LineRemote, LiveOpening, LiveReceivers, LiveTerms,
    MachineCopy, Opening, PartialMap, Remote, Traffic, fetch, limit_fetch,
};
pub use serve_fetch::serve_fetch;
pub use source::CopySource;
pub use status::{
    CopiesStamp, CopyCounts, CopyRecords, CopyState, CopyTarget, Cut, FailedCopy, MachineCopies,
    RunningCopy, StatusReader, TargetCopies,
};
pub use windows::{RateWindow, RateWindows, local_time};
