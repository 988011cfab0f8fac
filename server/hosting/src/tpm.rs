//! The TPM of a booted machine: swtpm, on a private copy of the stored state.

use std::ffi::OsString;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use coldrise_block::{
    end_with_this_thread, read_small_file, write_synced, Context, Error, ErrorKind, Result,
};
use coldrise_session::{update_parts, SessionDocument};
use coldrise_store::{
    MachinePart, Repository, SessionName, MAX_PART_BYTES, SWTPM_PERMALL, TPM_STATE,
};
use rustix::process::Signal;

use crate::caller::Caller;
use crate::child;

const PROGRAM: &str = "swtpm";
/// The state in the machine's folder.
pub(crate) const STATE: &str = "tpm/tpm2-00.permall";
/// How long swtpm may take to make its socket, and to end.
const PATIENCE: Duration = Duration::from_secs(10);
const INTERVAL: Duration = Duration::from_millis(5);

/// A running swtpm. Dropping it ends it.
pub struct Tpm {
    process: Child,
    state: PathBuf,
    socket: PathBuf,
}

impl Tpm {
    /// Starts it with a session's state, in the machine's `folder`; its socket lies in `sockets`. `None` without a stored state, or, with a
    /// remark, if swtpm is not installed.
    ///
    /// # Errors
    /// `ToolFailed` if it does not start; errors of the operating system.
    pub fn start(
        caller: &Caller,
        session: &SessionDocument,
        folder: &Path,
        sockets: &Path,
    ) -> Result<Option<Tpm>> {
        let Some(part) = session.part(TPM_STATE) else { return Ok(None) };
        if part.format != SWTPM_PERMALL {
            caller.remark(
                "the machine starts without its TPM: its stored state has an unknown format",
            );
            return Ok(None);
        }
        let (state, socket) = (folder.join(STATE), sockets.join("tpm.socket"));
        let own = state.parent().unwrap_or(folder);
        let what = || format!("writing {}", state.display());
        DirBuilder::new().mode(0o700).create(own).context(what)?;
        write_synced(&state, &part.content()?).context(what)?;
        let mut command = Command::new(PROGRAM);
        // A Ctrl-C on the terminal is for this program.
        command.current_dir(own).process_group(0).stdin(Stdio::null()).stdout(Stdio::null());
        command.args(["socket", "--tpm2", "--tpmstate", "dir=.,mode=0600", "--ctrl"]);
        let mut control = OsString::from("type=unixio,path=");
        control.push(&socket);
        command.arg(control);
        end_with_this_thread(&mut command, Signal::KILL);
        let process = match command.spawn() {
            Ok(process) => process,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                caller.remark(
                    "the machine starts without its TPM: swtpm is not installed here (Debian: apt install swtpm)",
                );
                return Ok(None);
            }
            Err(error) => return Err(error).context(|| format!("starting {PROGRAM}")),
        };
        let mut tpm = Tpm { process, state, socket };
        tpm.wait_for_socket().map(|()| Some(tpm))
    }

    fn wait_for_socket(&mut self) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        while !self.socket.exists() {
            if let Some(status) = self.process.try_wait().context(|| "looking after swtpm")? {
                return Err(child::ended_error(PROGRAM, status));
            }
            if Instant::now() > until {
                let text = format!("{PROGRAM} did not make its socket in time");
                return Err(Error::new(ErrorKind::ToolFailed, text));
            }
            std::thread::sleep(INTERVAL);
        }
        Ok(())
    }

    /// QEMU's arguments.
    pub fn words(&self) -> Vec<OsString> {
        let mut socket = OsString::from("socket,id=tpm,path=");
        socket.push(self.socket.display().to_string().replace(',', ",,"));
        let device = ["-tpmdev", "emulator,id=tpm0,chardev=tpm", "-device", "tpm-crb,tpmdev=tpm0"];
        let device = device.into_iter().map(OsString::from);
        ["-chardev".into(), socket].into_iter().chain(device).collect()
    }

    /// Ends it after its machine, and keeps its state with the session: the next seal takes it over.
    ///
    /// # Errors
    /// As for [`keep`].
    pub fn finish(mut self, repository: &Repository, session: &SessionName) -> Result<()> {
        child::end(&mut self.process, PROGRAM, PATIENCE, None)?;
        keep(repository, session, &self.state)
    }
}

impl Drop for Tpm {
    fn drop(&mut self) {
        let _ = child::end(&mut self.process, PROGRAM, PATIENCE, None);
    }
}

/// Keeps a TPM's state with a session. swtpm replaces the file whole.
///
/// # Errors
/// Errors of the operating system.
pub(crate) fn keep(repository: &Repository, session: &SessionName, state: &Path) -> Result<()> {
    let content = read_small_file(state, MAX_PART_BYTES)?;
    update_parts(repository, session, vec![MachinePart::new(TPM_STATE, SWTPM_PERMALL, &content)?])
}
