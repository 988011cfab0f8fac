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
pub mod confinement;
mod disk_file;
mod files;
mod freezes;
mod host;
mod image_confinement;
mod image_files;
mod kvm;
mod limits;
mod messages;
mod programs;
mod qemu;
mod relay;
mod scratch;
mod serve;
mod socket_access;
mod sockets;
mod tasks;
mod virsh;
mod watched_file;

pub use channel::{greets, Channel};
pub use disk_file::{discard_disk_file, loop_device, open_disk_file, DiskFacts};
pub use host::{FileWatch, Host, HostProgram, ScratchSpace};
pub use image_confinement::{import_confinement, AllowedFile, Bounds, Confinement};
pub use image_files::{FileFacts, FilesState};
pub use kvm::{has_virtualisation, kvm_works};
pub use limits::Limits;
pub use messages::{
    read_frame, write_frame, Answer, Envelope, Facts, FileKind, FoundFile, HostError, Outcome,
    Reply, Request, PROTOCOL_VERSION,
};
pub use programs::{ProgramEnd, ProgramStart, ProgramState, MAX_MESSAGES_BYTES};
pub use qemu::{installed_program, QemuFacts, QEMU};
pub use scratch::{default_scratch, free_bytes, no_space, TABLES_BYTES};
pub use serve::{bridge, serve, SILENCE};
pub use socket_access::{parse_mode, SocketAccess, SocketOwner};
pub use sockets::{default_owner, socket_path};
pub use tasks::HostTasks;
