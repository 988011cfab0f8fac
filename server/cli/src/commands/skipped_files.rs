//! Names the session's files that a sealed point does not carry.

use coldrise_session::SkippedFile;

use crate::units::show_size;

/// One line each, on stderr: the command itself succeeded.
pub(super) fn tell(files: &[SkippedFile]) {
    for SkippedFile { path, size_bytes, is_snapshot } in files {
        let size = show_size(*size_bytes);
        if *is_snapshot {
            tracing::error!(
                "{path} ({size}) is not in the point, and it looks like a hypervisor's snapshot: \
                 THE POINT LACKS WHAT THE MACHINE WROTE THERE. Remove the snapshot on the \
                 hypervisor, which writes it into the disk, and seal again"
            )
        } else {
            tracing::warn!("{path} ({size}) is not in the point: it is too large")
        }
    }
}
