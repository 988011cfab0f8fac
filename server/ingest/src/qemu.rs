//! QEMU's tools as children: image formats that are not ours are parsed there,
//! in another process, never here.
//!
//! `qemu-img` answers questions; `qemu-nbd` serves one image, read-only, on a private
//! Unix socket. Both are told the format; neither ever probes.

use std::ffi::OsStr;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use coldrise_block::{Context, Error, ErrorKind, Result};
use serde_json::{json, Value};

use crate::libnbd::Endpoint;

/// What is kept of a child's output, in bytes; the rest is read and dropped.
const MAX_OUTPUT_BYTES: u64 = 1 << 20;
/// What is kept of a child's messages, in bytes.
const MAX_MESSAGE_BYTES: u64 = 16 << 10;
/// How often a child that is about to end is looked at.
const REAP_INTERVAL: Duration = Duration::from_millis(5);
/// A hostile image may keep `qemu-img` busy for so many seconds of processor time, and
/// make it so many bytes large.
const QUESTION_LIMITS: [&str; 2] = ["--cpu=30", "--as=4294967296"];
/// A check reads all tables of an image, some GB where a disk has tens of TB.
const CHECK_LIMITS: [&str; 2] = ["--cpu=3600", "--as=17179869184"];
/// How often the cancel flag is looked at while `qemu-img` works.
const CANCEL_INTERVAL: Duration = Duration::from_millis(50);

/// The open-options of a local file or block device, format named, nothing below it:
/// `backing` is what the image's backing file becomes (null: nothing is opened).
///
/// Fails where the path cannot be said in JSON.
pub(crate) fn image_options(driver: &str, path: &Path, backing: Option<Value>) -> Result<Value> {
    let absolute = std::path::absolute(path)
        .context(|| format!("finding the absolute path of {}", path.display()))?;
    let Some(filename) = absolute.to_str() else {
        return Err(Error::new(
            ErrorKind::InvalidInput,
            format!("{}: QEMU needs a path in UTF-8; rename the file", path.display()),
        ));
    };
    let status = std::fs::metadata(path)
        .map_err(|error| Error::io(format!("opening the image {}", path.display()), error))?;
    let is_device = std::os::unix::fs::FileTypeExt::is_block_device(&status.file_type());
    let file_driver = if is_device { "host_device" } else { "file" };
    let mut options =
        json!({ "driver": driver, "file": { "driver": file_driver, "filename": filename } });
    // Raw and VHD know no backing file and would refuse the word.
    if matches!(driver, "qcow2" | "vmdk") {
        options["backing"] = backing.unwrap_or(Value::Null);
    }
    Ok(options)
}

/// QEMU's name for an image given by options.
fn json_name(options: &Value) -> String {
    format!("json:{options}")
}

fn missing_tool(tool: &str, error: std::io::Error) -> Error {
    Error::with_source(
        ErrorKind::ToolFailed,
        format!("starting {tool} (Debian: apt install qemu-utils)"),
        error,
    )
}

/// The part of a tool's messages that a person wants: without the tool's own
/// name and without the long `json:` name of the image.
fn plain_message(raw: &[u8], image: &str) -> String {
    let text = String::from_utf8_lossy(raw).replace(image, "the image");
    let lines: Vec<&str> = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .map(|line| {
            line.strip_prefix("qemu-img: ")
                .or_else(|| line.strip_prefix("qemu-nbd: "))
                .unwrap_or(line)
        })
        .collect();
    if lines.is_empty() {
        "it gave no reason".to_string()
    } else {
        lines.join("; ")
    }
}

/// Makes an error of what a tool said, with what can be done about it.
fn refused(what: &str, message: String) -> Error {
    let advice = if message.contains("lock") {
        " (the image is in use, most likely by a running VM: back it up through an NBD export \
         of that VM, or stop the VM first)"
    } else {
        ""
    };
    Error::with_source(ErrorKind::ToolFailed, format!("{what}{advice}"), message)
}

/// What a question to `qemu-img` brought.
struct Answer {
    status: ExitStatus,
    output: Vec<u8>,
    messages: String,
}

/// Runs `qemu-img`; `image` is left out of its messages.
fn ask_qemu_img(
    limits: [&str; 2],
    arguments: &[&OsStr],
    image: &str,
    cancel: &AtomicBool,
) -> Result<Answer> {
    let mut child = Command::new("setpriv")
        .args(["--pdeathsig", "KILL", "--", "prlimit"])
        .args(limits)
        .args(["--", "qemu-img"])
        .args(arguments)
        .env("LC_ALL", "C")
        // Ctrl-C on a terminal is for us: we end the child and say that we were cancelled.
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| missing_tool("qemu-img", error))?;
    let stderr = child.stderr.take();
    let stdout = child.stdout.take();
    let messages = std::thread::spawn(move || {
        stderr.map(|stderr| read_bounded(stderr, MAX_MESSAGE_BYTES)).unwrap_or_default()
    });
    let (ended, end) = std::sync::mpsc::channel::<()>();
    let output = std::thread::spawn(move || {
        // Dropped when the child has closed its output: it has ended or is about to.
        let _ended = ended;
        stdout.map(|stdout| read_bounded(stdout, MAX_OUTPUT_BYTES)).unwrap_or_default()
    });
    while let Err(RecvTimeoutError::Timeout) = end.recv_timeout(CANCEL_INTERVAL) {
        if cancel.load(Ordering::Relaxed) {
            // Refused only when the child is gone already.
            let _ = child.kill();
        }
    }
    let status = child.wait().context(|| "waiting for qemu-img")?;
    if cancel.load(Ordering::Relaxed) {
        return Err(Error::new(ErrorKind::Interrupted, "cancelled"));
    }
    Ok(Answer {
        status,
        output: output.join().unwrap_or_default(),
        messages: plain_message(&messages.join().unwrap_or_default(), image),
    })
}

/// Reads to the end, keeps the first `limit` bytes.
fn read_bounded(mut from: impl Read, limit: u64) -> Vec<u8> {
    let mut kept = Vec::new();
    let mut head = from.by_ref().take(limit);
    // What cannot be read of a child's output is missing from a message, no more.
    if head.read_to_end(&mut kept).is_ok() {
        let _ = std::io::copy(&mut from, &mut std::io::sink());
    }
    kept
}

/// What `qemu-img info` says of an image, as JSON. Nothing but the image itself
/// is opened.
pub(crate) fn image_facts(options: &Value, what: &str, cancel: &AtomicBool) -> Result<Value> {
    let name = json_name(options);
    let arguments = ["info", "--output=json", name.as_str()].map(OsStr::new);
    let answer = ask_qemu_img(QUESTION_LIMITS, &arguments, &name, cancel)?;
    if !answer.status.success() {
        return Err(refused(what, answer.messages));
    }
    serde_json::from_slice(&answer.output).map_err(|error| {
        Error::with_source(
            ErrorKind::ToolFailed,
            format!("{what}: the answer of qemu-img is no JSON"),
            error,
        )
    })
}

/// Has QEMU check an image's own tables where its format has a check (qcow2, vmdk).
/// Without it a truncated image would be read as if the missing part were zeroes.
pub(crate) fn check_image(
    driver: &str,
    options: &Value,
    path: &Path,
    cancel: &AtomicBool,
) -> Result<()> {
    if !matches!(driver, "qcow2" | "vmdk") {
        return Ok(());
    }
    let name = json_name(options);
    let arguments = ["check", "-q", "--output=json", name.as_str()].map(OsStr::new);
    let answer = ask_qemu_img(CHECK_LIMITS, &arguments, &name, cancel)?;
    match answer.status.code() {
        // 3: clusters are lost, which costs space and nothing else; 63: this kind of
        // image has no check.
        Some(0 | 3 | 63) => Ok(()),
        // One line per damaged cluster may follow: the first tells enough.
        Some(2) => Err(Error::with_source(
            ErrorKind::Io,
            format!("{} is damaged or truncated; qemu-img check tells more", path.display()),
            answer.messages.lines().next().unwrap_or_default().to_owned(),
        )),
        _ => Err(refused(&format!("checking {}", path.display()), answer.messages)),
    }
}

/// A `qemu-nbd` child that serves one image. Dropping it ends the child.
///
/// The listening socket is ours and is handed to the child (the systemd way), so
/// a connection made right after the start simply waits until the child is ready,
/// and fails when the child refuses the image: there is nothing to poll for.
pub(crate) struct ImageServer {
    child: Arc<Mutex<Child>>,
    /// Owns the child: the kernel ends the child when this thread's process dies.
    /// Brings the child's messages.
    keeper: Option<JoinHandle<Vec<u8>>>,
    name: String,
    directory: tempfile::TempDir,
}

/// Turns stdin into the socket that qemu-nbd expects as descriptor 3, and lets
/// the kernel end it together with us. The arguments travel as `$@`: the shell
/// never parses them.
const START_SCRIPT: &str = "exec 3<&0 </dev/null; export LISTEN_PID=$$ LISTEN_FDS=1; \
                            exec setpriv --pdeathsig KILL -- qemu-nbd \"$@\"";

impl ImageServer {
    /// Starts the child, for so many clients at once; `bitmap` is a persistent dirty
    /// bitmap of the image to export. That it accepts the image shows in the first
    /// connection.
    pub(crate) fn start(
        options: &Value,
        bitmap: Option<&str>,
        max_clients: u32,
    ) -> Result<ImageServer> {
        let directory = tempfile::Builder::new()
            .prefix("coldrise-")
            .permissions(std::fs::Permissions::from_mode(0o700))
            .tempdir()
            .context(|| "making a private folder for a socket")?;
        let listener = UnixListener::bind(directory.path().join("nbd"))
            .context(|| "making a private socket")?;
        let name = json_name(options);
        let mut command = Command::new("/bin/sh");
        command.args(["-c", START_SCRIPT, "qemu-nbd"]);
        command.arg("--read-only");
        if let Some(bitmap) = bitmap {
            command.arg(format!("--bitmap={bitmap}"));
        }
        command.arg(format!("--shared={}", max_clients)).arg("--").arg(&name);
        // Ctrl-C on a terminal is for us: we close the connection in order.
        command.env("LC_ALL", "C").process_group(0);
        command.stdin(Stdio::from(OwnedFd::from(listener)));
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        // The death signal is tied to the thread that starts the child, so that thread
        // has to live as long as the child.
        let (started, start) = std::sync::mpsc::sync_channel(1);
        let keeper = std::thread::Builder::new()
            .name("qemu-nbd".to_string())
            .spawn(move || {
                let spawned = command.spawn().map(|mut child| {
                    let stderr = child.stderr.take();
                    (Arc::new(Mutex::new(child)), stderr)
                });
                // Our copy of the socket goes away with the command: when the child ends,
                // waiting clients learn it.
                drop(command);
                match spawned {
                    Ok((child, stderr)) => {
                        let sent = started.send(Ok(Arc::clone(&child)));
                        drop(sent);
                        let messages = stderr
                            .map(|stderr| read_bounded(stderr, MAX_MESSAGE_BYTES))
                            .unwrap_or_default();
                        reap(&child);
                        messages
                    }
                    Err(error) => {
                        let sent = started.send(Err(error));
                        drop(sent);
                        Vec::new()
                    }
                }
            })
            .context(|| "starting a thread for qemu-nbd")?;
        let child = start
            .recv()
            .map_err(|error| Error::with_source(ErrorKind::Internal, "starting qemu-nbd", error))?
            .map_err(|error| missing_tool("qemu-nbd", error))?;
        Ok(ImageServer { child, keeper: Some(keeper), name, directory })
    }

    /// Where it listens.
    pub(crate) fn endpoint(&self) -> Endpoint {
        Endpoint::Socket(self.directory.path().join("nbd"))
    }

    /// Ends the child and makes an error of what it said, `error` being what the
    /// client saw. Where the child had nothing to say, `error` is all there is.
    pub(crate) fn explain(mut self, what: &str, error: Error) -> Error {
        // Only a broken connection or a refused request may be the child's doing.
        if error.kind() != ErrorKind::Io {
            return error.context(what);
        }
        // A child that refused the image ends by itself; give it the time to say why.
        let messages = self.end(Duration::from_secs(5));
        if messages.iter().all(u8::is_ascii_whitespace) {
            return error.context(what);
        }
        refused(what, plain_message(&messages, &self.name))
    }

    /// Lets the child end within `patience`, then kills it; its messages.
    fn end(&mut self, patience: Duration) -> Vec<u8> {
        let Some(keeper) = self.keeper.take() else { return Vec::new() };
        let started = Instant::now();
        while !keeper.is_finished() && started.elapsed() < patience {
            std::thread::sleep(REAP_INTERVAL);
        }
        if !keeper.is_finished() {
            // Refused only when the child is gone already.
            let _ = self.child.lock().unwrap_or_else(PoisonError::into_inner).kill();
        }
        keeper.join().unwrap_or_default()
    }
}

impl Drop for ImageServer {
    fn drop(&mut self) {
        self.end(Duration::ZERO);
    }
}

/// Waits for a child that has closed its messages, without keeping the lock, so
/// that [`ImageServer::end`] can still kill it.
fn reap(child: &Mutex<Child>) {
    loop {
        let state = child.lock().unwrap_or_else(PoisonError::into_inner).try_wait();
        if !matches!(state, Ok(None)) {
            return;
        }
        std::thread::sleep(REAP_INTERVAL);
    }
}
