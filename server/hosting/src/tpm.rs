//! The TPM of a booted machine: swtpm, on a private copy of the stored state.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use coldrise_block::{Context, Error, ErrorKind, Result, end_with_this_thread, read_small_file};
use coldrise_host::{Host, HostProgram, ProgramStart, ScratchSpace};
use coldrise_session::{SessionDocument, update_parts};
use coldrise_store::{
    MAX_PART_BYTES, MachinePart, Repository, SWTPM_PERMALL, SessionName, TPM_STATE,
};
use rustix::process::Signal;

use crate::caller::Caller;
use crate::child;
use crate::place::QemuPlace;

const PROGRAM: &str = "swtpm";
/// The state in the machine's folder.
pub(crate) const STATE: &str = "tpm/tpm2-00.permall";
/// How long swtpm may take to make its socket, and to end.
const PATIENCE: Duration = Duration::from_secs(10);
const INTERVAL: Duration = Duration::from_millis(5);

/// A running swtpm. Dropping it ends it.
pub struct Tpm {
    process: Process,
    state: PathBuf,
    socket: PathBuf,
}

/// It passes a descriptor to QEMU through its socket, so it runs on QEMU's host.
enum Process {
    Here(Child),
    There(HostProgram),
}

impl Tpm {
    /// Starts it with a session's state, in the machine's folder. `None` without a stored state, or, with a
    /// remark, if swtpm is not installed.
    ///
    /// # Errors
    /// `ToolFailed` if it does not start; errors of the operating system.
    pub fn start(
        caller: &Caller,
        session: &SessionDocument,
        place: &QemuPlace,
    ) -> Result<Option<Tpm>> {
        let Some(part) = session.part(TPM_STATE) else { return Ok(None) };
        if part.format != SWTPM_PERMALL {
            caller.remark(
                "the machine starts without its TPM: its stored state has an unknown format",
            );
            return Ok(None);
        }
        if !place.qemu.facts.has_swtpm {
            caller.remark(&format!(
                "{}the machine starts without its TPM: swtpm is not installed (Debian: apt install swtpm)",
                place.qemu.prefix()
            ));
            return Ok(None);
        }
        let state = place.folder.join(STATE);
        let own = state.parent().unwrap_or(&place.folder);
        place.qemu.host.write_file(&state, &part.content()?, true)?;
        let folder = place.space().map_or(&*place.sockets, ScratchSpace::folder);
        let socket = folder.join("tpm.socket");
        let mut words: Vec<OsString> =
            ["socket", "--tpm2", "--tpmstate"].into_iter().map(OsString::from).collect();
        let option = |start: &str, path: &Path, end: &str| {
            let mut option = OsString::from(start);
            option.push(path);
            option.push(end);
            option
        };
        // A comma separates options; it is started in the folder of its state, or in the private folder on another host.
        let started_in = place.space().map_or(own, ScratchSpace::folder);
        let relative = own.strip_prefix(started_in).unwrap_or(own);
        words.push(option("dir=", &Path::new(".").join(relative), ",mode=0600"));
        words.extend(["--ctrl".into(), option("type=unixio,path=", &socket, "")]);
        let process = match place.space() {
            None => Process::Here(start_here(&words, own)?),
            Some(space) => {
                let words = words.iter().map(|word| word.to_string_lossy().into_owned()).collect();
                let program = PROGRAM.to_owned();
                let start = ProgramStart { program, words, ..ProgramStart::default() };
                Process::There(space.start(start)?)
            }
        };
        let mut tpm = Tpm { process, state, socket };
        tpm.wait_for_socket(&place.qemu.host).map(|()| Some(tpm))
    }

    fn wait_for_socket(&mut self, host: &Host) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        while let [None] = host.look([&self.socket])? {
            self.check()?;
            if Instant::now() > until {
                let text = format!("{PROGRAM} did not make its socket in time");
                return Err(Error::new(ErrorKind::ToolFailed, text));
            }
            std::thread::sleep(INTERVAL);
        }
        Ok(())
    }

    /// Checks that it runs.
    fn check(&mut self) -> Result<()> {
        match &mut self.process {
            Process::Here(child) => match child.try_wait().context(|| "looking after swtpm")? {
                Some(status) => Err(child::ended_error(PROGRAM, status)),
                None => Ok(()),
            },
            Process::There(program) => {
                let state = program.state(Duration::ZERO)?;
                match state.end {
                    Some(_) => {
                        let text = format!("{PROGRAM} ended: {}", state.messages.trim());
                        Err(Error::new(ErrorKind::ToolFailed, text))
                    }
                    None => Ok(()),
                }
            }
        }
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
        if let Process::Here(child) = &mut self.process {
            child::end(child, PROGRAM, PATIENCE, None)?;
        }
        keep(repository, session, &self.state)
    }
}

impl Drop for Tpm {
    fn drop(&mut self) {
        if let Process::Here(child) = &mut self.process {
            let _ = child::end(child, PROGRAM, PATIENCE, None);
        }
    }
}

fn start_here(words: &[OsString], folder: &Path) -> Result<Child> {
    let mut command = Command::new(PROGRAM);
    // A Ctrl-C on the terminal is for this program.
    command
        .args(words)
        .current_dir(folder)
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    end_with_this_thread(&mut command, Signal::KILL);
    command.spawn().context(|| format!("starting {PROGRAM}"))
}

/// Keeps a TPM's state with a session. swtpm replaces the file whole.
///
/// # Errors
/// Errors of the operating system.
pub(crate) fn keep(repository: &Repository, session: &SessionName, state: &Path) -> Result<()> {
    let content = read_small_file(state, MAX_PART_BYTES)?;
    update_parts(repository, session, vec![MachinePart::new(TPM_STATE, SWTPM_PERMALL, &content)?])
}
