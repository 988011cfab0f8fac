//! QEMU's process: a child, or a program on another host that ends with the connection.

use std::ffi::OsString;
use std::process::Stdio;
use std::time::Duration;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_host::confinement::{NetworkReach, Reach};
use coldrise_host::{HostProgram, ProgramEnd, ProgramStart, ProgramState};

use super::machine::END_PATIENCE;
use crate::caller::Caller;
use crate::child;
use crate::place::QemuPlace;
use crate::qemu::PROGRAM;
use crate::qemu_process::{MessagePrinter, QemuProcess};

/// QEMU's process.
pub(super) enum MachineProcess {
    Here(QemuProcess),
    There(ProcessThere),
}

pub(super) struct ProcessThere {
    program: HostProgram,
    /// The beginning of messages: the name of its host.
    prefix: String,
    printer: MessagePrinter,
    /// Length of its messages that were printed, in bytes.
    printed: usize,
}

impl MachineProcess {
    /// Starts QEMU, which reaches its folder, and accepts connections at `port`.
    ///
    /// # Errors
    /// `ToolFailed` if it cannot be started; errors of the connection.
    pub(super) fn start(
        caller: &Caller,
        words: Vec<OsString>,
        place: &QemuPlace,
        port: Option<u16>,
    ) -> Result<MachineProcess> {
        let (folder, network) = (&place.folder, NetworkReach::Port(port));
        let Some(space) = place.space() else {
            let output = Stdio::null();
            return QemuProcess::start_confined(caller, words, &[], folder, network, output)
                .map(MachineProcess::Here);
        };
        let prefix = place.qemu.prefix();
        if !place.qemu.facts.confines {
            caller.remark(&format!(
                "warning: {prefix}QEMU is not confined: its kernel has no Landlock, or it is turned off"
            ));
        }
        let program = place.qemu.facts.program.clone();
        let folders = vec![folder.clone()];
        let start = ProgramStart {
            program: PROGRAM.to_owned(),
            words: words.iter().map(|word| word.to_string_lossy().into_owned()).collect(),
            reach: Some(Reach { program, files: Vec::new(), folders, network }),
            ..Default::default()
        };
        let program = space.start(start)?;
        let printer = MessagePrinter::new(caller.print_message);
        Ok(MachineProcess::There(ProcessThere { program, prefix, printer, printed: 0 }))
    }

    /// Checks that QEMU still runs.
    ///
    /// # Errors
    /// `ToolFailed` if it has ended; errors of the connection.
    pub(super) fn check(&mut self) -> Result<()> {
        match self {
            MachineProcess::Here(process) => process.check(),
            MachineProcess::There(process) => process.check(),
        }
    }

    /// See [`super::machine::Machine::check_connection`].
    pub(super) fn check_connection(&self) -> Result<()> {
        match self {
            MachineProcess::Here(_) => Ok(()),
            MachineProcess::There(process) => process.program.state(Duration::ZERO).map(drop),
        }
    }

    /// Ends it.
    pub(super) fn end(&mut self) {
        match self {
            MachineProcess::Here(process) => {
                let _ = child::end(process.child(), PROGRAM, END_PATIENCE, None);
            }
            // It is killed when it is dropped.
            MachineProcess::There(_) => {}
        }
    }
}

impl ProcessThere {
    fn check(&mut self) -> Result<()> {
        let ProgramState { end, messages, .. } = self.program.state(Duration::ZERO)?;
        let new = messages.get(self.printed..).unwrap_or_default();
        self.printed = messages.len();
        self.printer.print(new.as_bytes());
        let Some(end) = end else { return Ok(()) };
        self.printer.finish();
        let how = match end {
            ProgramEnd::Code(code) => format!("exit code {code}"),
            ProgramEnd::Signal(signal) => format!("signal {signal}"),
            ProgramEnd::Unknown => "unknown end".to_owned(),
        };
        let text = format!("{}{PROGRAM} ended ({how}); the lines above say why", self.prefix);
        Err(Error::new(ErrorKind::ToolFailed, text))
    }
}
