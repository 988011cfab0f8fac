//! Progress of long work. The caller displays it.

/// The present phase of the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Opening and inspecting a source.
    Opening,
    /// Reading a disk from its source and storing it.
    Storing,
    /// Writing a disk to its target.
    Restoring,
    /// Making the written bytes durable.
    Finishing,
    /// Reading and authenticating stored chunks.
    Verifying,
    /// Freeing the space of unreferenced chunks.
    Reclaiming,
    /// Copying the disks of a running machine.
    Moving,
}

/// The progress of one disk.
#[derive(Clone, Copy, Debug)]
pub struct ProgressState<'a> {
    /// The present phase.
    pub phase: Phase,
    /// The disk's name, or the target of a restore.
    pub disk: &'a str,
    /// Completed bytes of the disk, holes and unchanged ranges included.
    pub done_bytes: u64,
    /// Size of the disk.
    pub total_bytes: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written to the repository (compressed) or to the target.
    pub stored_bytes: u64,
}

/// Receives the progress. Calls are frequent, so they must return quickly. A restore calls
/// it from several threads, where two calls may come in the wrong order.
pub trait Progress: Sync {
    /// The work has reached `state`.
    fn update(&self, state: &ProgressState<'_>);
}

/// Ignores the progress.
pub struct NoProgress;

impl Progress for NoProgress {
    fn update(&self, _state: &ProgressState<'_>) {}
}
