//! tgtd, the iSCSI server of the Linux SCSI target framework.

use std::cell::Cell;
use std::collections::VecDeque;
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::Arc;

use coldrise_block::{Context, Error, ErrorKind, Result, end_with_this_thread};
use parking_lot::Mutex;
use rustix::process::Signal;

use super::iscsi::{Chap, Target};
use super::tgt::Control;
use super::{Program, check_free};

const PROGRAM: &str = "tgtd";
/// tgtd's variable for the path of its control socket, to which it adds a dot and a number.
const SOCKET: &str = "TGT_IPC_SOCKET";
const CONTROL_PORT: &str = "0";
/// Longest shown line of tgtd, in characters.
const MAX_LINE_CHARS: usize = 500;
/// The number of tgtd's last lines that are shown if it fails.
const KEPT_LINES: usize = 20;

/// The parameters of the server.
pub struct IscsiOptions {
    /// The address and port.
    pub listen: SocketAddr,
    /// The name and secret that initiators must give; none: any initiator may connect.
    pub chap: Option<Chap>,
    /// Addresses and networks of initiators; all, if it is empty.
    pub allowed: Vec<String>,
}

/// tgtd with a control socket of its own.
pub struct Tgtd {
    options: IscsiOptions,
    targets: Vec<Target>,
    socket: PathBuf,
    /// Where it listens until its targets are known: without any address tgtd listens on all.
    first: Cell<SocketAddr>,
    is_set_up: Cell<bool>,
    messages: Arc<Mutex<VecDeque<String>>>,
}

/// Checks that tgtd is installed.
///
/// # Errors
/// `ToolFailed` if it is missing.
pub fn check_installed() -> Result<()> {
    Command::new(PROGRAM).arg("--version").output().map(drop).map_err(missing)
}

fn missing(error: std::io::Error) -> Error {
    let text = "starting tgtd, which serves iSCSI (Debian: apt install tgt)";
    Error::with_source(ErrorKind::ToolFailed, text, error)
}

impl Tgtd {
    /// # Errors
    /// `Busy` if another server has the address.
    pub fn new(options: IscsiOptions, targets: Vec<Target>, state: &Path) -> Result<Tgtd> {
        check_free(options.listen)?;
        let socket = state.join("tgtd");
        let first = Cell::new(options.listen);
        let (is_set_up, messages) = Default::default();
        Ok(Tgtd { options, targets, socket, first, is_set_up, messages })
    }

    fn control_socket(&self) -> PathBuf {
        self.socket.with_extension(CONTROL_PORT)
    }
}

impl Program for Tgtd {
    const NAME: &'static str = PROGRAM;

    fn spawn(&self) -> Result<Child> {
        self.is_set_up.set(false);
        self.first.set(free_address()?);
        let mut command = Command::new(PROGRAM);
        // It ignores SIGTERM. No write that it has acknowledged is lost with it.
        end_with_this_thread(&mut command, Signal::KILL);
        command.args(["--foreground", "--control-port", CONTROL_PORT]);
        command.arg("--iscsi").arg(format!("portal={}", self.first.get()));
        command.env(SOCKET, &self.socket);
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        tracing::debug!(?command, "starting tgtd");
        let mut child = command.spawn().map_err(missing)?;
        if let Some(messages) = child.stderr.take() {
            let kept = Arc::clone(&self.messages);
            std::thread::spawn(move || listen_to(messages, &kept));
        }
        Ok(child)
    }

    fn is_ready(&self) -> Result<bool> {
        let socket = self.control_socket();
        let control = Control::new(&socket);
        if !self.is_set_up.get() {
            if !control.answers() {
                return Ok(false);
            }
            let IscsiOptions { chap, allowed, .. } = &self.options;
            let portals = [self.first.get(), self.options.listen];
            control.set_up(&self.targets, chap.as_ref(), allowed, portals)?;
            self.is_set_up.set(true);
        }
        Ok(true)
    }

    fn tell_messages(&self) {
        self.messages.lock().drain(..).for_each(|line| tracing::warn!("{line}"));
    }

    fn prepare_end(&self) {
        Control::new(&self.control_socket()).end(self.targets.len());
    }
}

/// Keeps the last lines. In the good case tgtd tells what looks like failures, such as missing RDMA.
fn listen_to(messages: ChildStderr, kept: &Mutex<VecDeque<String>>) {
    for line in BufReader::new(messages).split(b'\n').map_while(std::io::Result::ok) {
        let line = String::from_utf8_lossy(&line);
        let line: String = line.chars().filter(|c| !c.is_control()).take(MAX_LINE_CHARS).collect();
        tracing::debug!("{line}");
        let mut kept = kept.lock();
        if kept.len() == KEPT_LINES {
            kept.pop_front();
        }
        kept.push_back(line);
    }
}

/// A free port of loopback.
fn free_address() -> Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
    listener.and_then(|listener| listener.local_addr()).context(|| "looking for a free port")
}
