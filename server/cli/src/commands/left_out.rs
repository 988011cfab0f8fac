//! Tells which files of a session a sealed point does not carry.

use coldrise_session::LeftOut;

use crate::units::show_size;

/// One line each, on stderr: what was asked for was done.
pub(super) fn tell(files: &[LeftOut]) {
    for LeftOut { path, size_bytes, is_snapshot } in files {
        let size = show_size(*size_bytes);
        match is_snapshot {
            false => tracing::warn!("{path} ({size}) is not in the point: it is too large"),
            true => tracing::error!(
                "{path} ({size}) is not in the point, and it looks like a hypervisor's snapshot: \
                 THE POINT LACKS WHAT THE MACHINE WROTE THERE. Remove the snapshot on the \
                 hypervisor, which writes it into the disk, and seal again"
            ),
        }
    }
}
