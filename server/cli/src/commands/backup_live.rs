//! The part of `coldrise backup` for machines that run: --from.

use std::path::PathBuf;

use clap::Args;
use coldrise_live_backup::{Instant, LiveOptions, Mode};
use serde::Serialize;

#[derive(Debug, Args)]
pub(super) struct LiveArguments {
    /// Back up a machine while it runs: libvirt, libvirt:DOMAIN, or qmp:SOCKET with the monitor of its
    /// QEMU (-qmp unix:SOCKET,...). Default for DOMAIN: MACHINE.
    ///
    /// All writable disks are backed up as they are at one instant. What the machine overwrites meanwhile is
    /// saved in scratch files. Checkpoints or dirty bitmaps are made and named for the point that they
    /// count from: the next backup reads only what has changed. See docs/recovery.md.
    #[arg(long, value_name = "SOURCE")]
    from: Option<String>,

    /// With --from libvirt: the URI of libvirt on this host. Default: $LIBVIRT_DEFAULT_URI, else
    /// qemu:///system.
    #[arg(long, value_name = "URI", requires = "from")]
    connect: Option<String>,

    /// With --from: the folder of the scratch files, which vanish with the backup. With libvirt it needs as
    /// much free space as the disks have. Default: $TMPDIR, else /var/tmp.
    #[arg(long, value_name = "DIR", requires = "from")]
    scratch: Option<PathBuf>,

    /// With --from: QEMU copies the disks, or what has changed, into scratch files before they are
    /// read.
    ///
    /// For disks with an iothread in a QEMU before 9.0, and for disks that are much slower to read
    /// over a longer time. The scratch files need as much space as is copied, which is allocated first.
    /// Meanwhile the machine's writes can wait for the scratch files.
    #[arg(long, requires = "from")]
    push: bool,

    /// With --from: freeze the guest's file systems for the instant, through its agent; at most
    /// 10 s. If the agent does not answer, the backup is made without.
    #[arg(long, requires = "from")]
    quiesce: bool,

    /// With --quiesce and qmp: the socket of the guest agent's port. libvirt knows its own.
    #[arg(long, value_name = "SOCKET", requires = "quiesce")]
    agent: Option<PathBuf>,
}

impl LiveArguments {
    /// The options, if the machine runs.
    pub(super) fn options(self) -> Option<LiveOptions> {
        Some(LiveOptions {
            from: self.from?,
            connect: self.connect,
            scratch: self.scratch,
            mode: if self.push { Mode::Push } else { Mode::Pull },
            is_quiesced: self.quiesce,
            agent: self.agent,
        })
    }
}

#[derive(Serialize)]
pub(super) struct MadeInstant<'a> {
    /// How long the machine stood still, at most; absent if it did not.
    standstill_us: Option<u64>,
    is_quiesced: bool,
    remarks: &'a [String],
}

impl<'a> MadeInstant<'a> {
    pub(super) fn new(instant: &'a Instant) -> MadeInstant<'a> {
        MadeInstant {
            standstill_us: instant.standstill.map(|time| time.as_micros() as u64),
            is_quiesced: instant.is_quiesced,
            remarks: &instant.remarks,
        }
    }

    /// For people.
    pub(super) fn sentence(&self) -> String {
        let kind = if self.is_quiesced { "with frozen file systems" } else { "crash-consistent" };
        let stood = match self.standstill_us {
            Some(time) => {
                format!("; the machine stood still for {:.1} ms", time as f64 / 1000.0)
            }
            None => String::new(),
        };
        format!(": all disks at one instant, {kind}{stood}")
    }
}
