//! Machines, points, sessions and space as documents.
//!
//! A document is what `--json` prints and what the API answers: both fill the same type with the
//! same function, so one thing has one form.
//!
//! ```text
//!   coldrise list, show, … ──▶ documents ◀── Inventory ◀── coldrised
//!                                 │              │ index of all points, refreshed by signs
//!                                 ▼              ▼
//!                       Repository, Catalog, sessions, ExportTree
//! ```
//!
//! [`Inventory`] is for a program that runs for months: it keeps a small index in memory and reads
//! again only what changed. Commands fill the documents from a repository that they have just
//! opened.
//!
//! No lock is held while the repository is read.
#![forbid(unsafe_code)]

mod activity;
mod boot_stage;
mod compare;
mod configured_name;
mod content;
mod damage;
mod difference;
mod gc_estimate;
mod hardware;
mod incoming;
mod index;
mod inventory;
mod listing;
mod machine_pattern;
mod machines;
mod marks;
mod occupied;
mod points;
mod retention;
mod schema;
mod sessions;
mod space;

pub use activity::{ActivityTotals, ActivityWatch};
pub use boot_stage::BootStage;
pub use compare::{Range, changed_ranges};
pub use configured_name::{configured_name, configured_uuid};
pub use content::Content;
pub use damage::{Damage, DamageListing};
pub use difference::{Difference, DifferingRange, DiskDifference};
pub use gc_estimate::{Space, estimate_gc};
pub use hardware::ovf::{
    Controller, DescribedDisk, Envelope, EnvelopeDisk, NetworkCard, VirtualSystem, descriptor,
    escaped,
};
pub use hardware::{DiskBus, Firmware, Hardware, LOST_TPM, Network, QEMU_BYTES, has_tpm};
pub use incoming::IncomingDetails;
pub use inventory::{Changes, Inventory};
pub use listing::{DiskList, ListedDisk, ListedMachine, ListedPoint, Listing, PointKind};
pub use machine_pattern::{MachinePattern, matches_wildcards};
pub use machines::{BootBadge, MachineSummary, PointPage, PointQuery, PointSummary};
pub use marks::{Followed, MarkDetails, MarkStretch, MarksDetails, SiteDetails};
pub use points::{PointDetails, PointDisk, PointPart, find_disk};
pub use retention::{
    PrunedMachine, PrunedPoint, Retention, RetentionPlan, going, machines_or_all,
    retention_verdicts,
};
pub use schema::{
    BootCheckSchema, BootVerdictSchema, ConfigurationSchema, DamageSchema, IndexMemorySchema,
    QuarantineSchema, ReachedStageSchema,
};
pub use sessions::{SessionDetails, SessionDiskDetails, SessionListing, SessionServer};
pub use space::{MachineStats, PointStats, Stats, Unique, saved_percent};
