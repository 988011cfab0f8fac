//! What happens on a hypervisor's host beside libvirt: scratch files, files of machines, calls of virsh,
//! QEMU's tools.
//!
//! ```text
//!   Host ─▶ HostTasks                                          this host: in this process
//!        └▶ a connection of SSH ─▶ coldrise-host ─▶ HostTasks   another host: the same code there
//! ```
//!
//! The program `coldrise-host` has no key of a repository and stores nothing. It ends with its connection.
#![forbid(unsafe_code)]

mod calls;
mod channel;
mod confinement;
mod files;
mod freezes;
mod host;
mod limits;
mod messages;
mod programs;
mod scratch;
mod serve;
mod tasks;
mod virsh;
mod watched_file;

pub use channel::{greets, Channel};
pub use confinement::{import_confinement, AllowedFile, Bounds, Confinement};
pub use files::{FileFacts, FilesState};
pub use host::{FileWatch, Host, HostProgram, ScratchSpace};
pub use limits::Limits;
pub use messages::{
    read_frame, write_frame, Answer, Envelope, Facts, HostError, Outcome, Reply, Request,
    PROTOCOL_VERSION,
};
pub use programs::{ProgramEnd, ProgramStart, ProgramState};
pub use scratch::{default_scratch, free_bytes, no_space, TABLES_BYTES};
pub use serve::{bridge, serve, SILENCE};
pub use tasks::HostTasks;
