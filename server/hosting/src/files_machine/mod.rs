//! The machine that reads file systems, and the process in the background that keeps it for the next
//! commands.
//!
//! ```text
//! command ──locks `use`──▶ place ◀──holds `lock`── background process ──▶ session, nbdkit, QEMU
//!    └───────────────────── the machine's port ◀───────────────────────────┘
//! ```
//!
//! A command that finds no background process starts one and holds a pipe to it. Only when the command has got its
//! answer does it write to the pipe that the background process may stay; if it is killed, the background process ends with it.
//!
//! A machine of the service is a run (`files serve`): its port lies in the run's folder.

mod background;
mod kept;
mod machine;
mod machine_end;
mod place;
mod reading;
mod served;
mod slot;
mod versions;

pub use background::keep;
pub(crate) use kept::KeptMachine;
pub use machine::{FilesMachine, PointDisks};
pub use reading::Reading;
pub use served::serve;
pub use versions::read_points;
