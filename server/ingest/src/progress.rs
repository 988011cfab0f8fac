//! How far long work has come. Whoever started it draws it.

/// What the work is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// A source is opened and looked over.
    Opening,
    /// A disk is read from its source and stored.
    Storing,
    /// A disk is written to its target.
    Restoring,
    /// What was written is made durable.
    Finishing,
    /// What is stored is read and authenticated.
    Verifying,
    /// Space of what nothing refers to any more is given back.
    Reclaiming,
}

/// How far one disk has come.
#[derive(Clone, Copy, Debug)]
pub struct ProgressState<'a> {
    /// What the work is doing.
    pub phase: Phase,
    /// The disk's name, or the target of a restore.
    pub disk: &'a str,
    /// Bytes of the disk that are dealt with, holes and unchanged ranges included.
    pub done_bytes: u64,
    /// Size of the disk.
    pub total_bytes: u64,
    /// Bytes that were really read.
    pub read_bytes: u64,
    /// Bytes that were really written: to the repository (compressed) or the target.
    pub stored_bytes: u64,
}

/// Hears how far the work has come: often, so it has to return quickly. A restore
/// calls it from several threads: there two calls may come in the wrong order.
pub trait Progress: Sync {
    /// The work has come to `state`.
    fn update(&self, state: &ProgressState<'_>);
}

/// Nobody listens.
pub struct NoProgress;

impl Progress for NoProgress {
    fn update(&self, _state: &ProgressState<'_>) {}
}
