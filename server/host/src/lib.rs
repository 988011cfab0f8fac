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

pub use channel::{Channel, greets};
pub use disk_file::{DiskFacts, discard_disk_file, loop_device, open_disk_file};
pub use host::{FileWatch, Host, HostProgram, ScratchSpace};
pub use image_confinement::{AllowedFile, Bounds, Confinement, import_confinement};
pub use image_files::{FileFacts, FilesState};
pub use kvm::{has_virtualisation, kvm_works};
pub use limits::Limits;
pub use messages::{
    Answer, Envelope, Facts, FileKind, FoundFile, HostError, Outcome, PROTOCOL_VERSION, Reply,
    Request, read_frame, write_frame,
};
pub use programs::{MAX_MESSAGES_BYTES, ProgramEnd, ProgramStart, ProgramState};
pub use qemu::{QEMU, QemuFacts, installed_program};
pub use scratch::{TABLES_BYTES, default_scratch, free_bytes, no_space};
pub use serve::{SILENCE, bridge, serve};
pub use socket_access::{SocketAccess, SocketOwner, parse_mode};
pub use sockets::{default_owner, socket_path};
pub use tasks::HostTasks;
