//! The life of a session: publish, serve, seal, unpublish.
//!
//! ```text
//!   publish ─▶ Session (serves) ─▶ unpublish
//!                 │ ▲
//!            seal ▼ │ control: other processes ask for a seal, a fold for a rebase
//!               point
//! ```
//!
//! One process at a time serves a session: it holds `live/HASH/lock`. The session's mutex for seals
//! is taken after that lock and before `live/lock`.

pub(crate) mod changes;
pub(crate) mod control;
pub(crate) mod folded_disks;
pub(crate) mod follow;
pub(crate) mod listed;
pub(crate) mod marks;
pub(crate) mod owned;
pub(crate) mod parts;
pub(crate) mod point_of_mark;
pub(crate) mod publish;
pub(crate) mod received;
pub(crate) mod seal;
pub(crate) mod seal_report;
pub(crate) mod session;
pub(crate) mod sites;
pub(crate) mod unpublish;
