//! Queries `qemu-img` about one image.

use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use coldrise_block::{Error, ErrorKind, Result};
use serde_json::Value;

use super::child::{read_bounded, ConfinedChild};
use super::limits::Limits;
use super::{plain_message, refused, QemuImage};

/// Bytes kept of a child's output.
const MAX_OUTPUT_BYTES: u64 = 1 << 20;
const OUTPUT_BYTES_PER_FILE: u64 = 1 << 10;
/// How often the cancel flag is checked while `qemu-img` works.
const CANCEL_INTERVAL: Duration = Duration::from_millis(50);

/// The answer of `qemu-img`.
pub(super) struct Answer {
    pub(super) status: Option<ExitStatus>,
    output: Vec<u8>,
    pub(super) messages: String,
}

/// Runs `qemu-img` with `words`, the image's name and `more`. The name is removed from its messages.
pub(super) fn ask(
    words: &[&str],
    image: &QemuImage,
    more: &[&str],
    what: &str,
    cancel: &AtomicBool,
) -> Result<Answer> {
    let is_change = image.files.iter().any(|file| file.is_writable);
    let limits = if is_change { Limits::of_change(image) } else { Limits::of_question(image) };
    let name = image.name();
    let mut command = Command::new("prlimit");
    command
        .args(limits.arguments())
        .args(["--", "qemu-img"])
        .args(words)
        .arg(&name)
        .args(more)
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let (child, stdout) = ConfinedChild::start("qemu-img", command, image, limits)?;
    let (ended, end) = std::sync::mpsc::channel::<()>();
    let most = MAX_OUTPUT_BYTES + OUTPUT_BYTES_PER_FILE * image.files.len() as u64;
    let output = std::thread::spawn(move || {
        // Dropped when the child has closed its output: it has ended or is about to end.
        let _ended = ended;
        stdout.map(|stdout| read_bounded(stdout, most)).unwrap_or_default()
    });
    while let Err(RecvTimeoutError::Timeout) = end.recv_timeout(CANCEL_INTERVAL) {
        if cancel.load(Ordering::Relaxed) {
            child.kill();
        }
    }
    let end = child.wait();
    if cancel.load(Ordering::Relaxed) {
        return Err(Error::new(ErrorKind::Interrupted, "cancelled"));
    }
    if let Some(why) = child.limit_reached(&end) {
        return Err(refused(what, why));
    }
    Ok(Answer {
        status: end.status,
        output: output.join().unwrap_or_default(),
        messages: plain_message(&end.messages, &name),
    })
}

/// The answer of `qemu-img info` as JSON. It opens only the image itself.
pub(crate) fn image_facts(image: &QemuImage, what: &str, cancel: &AtomicBool) -> Result<Value> {
    let answer = ask(&["info", "--output=json"], image, &[], what, cancel)?;
    if !answer.status.is_some_and(|status| status.success()) {
        return Err(refused(what, answer.messages));
    }
    serde_json::from_slice(&answer.output).map_err(|error| {
        Error::with_source(
            ErrorKind::ToolFailed,
            format!("{what}: the answer of qemu-img is not JSON"),
            error,
        )
    })
}

/// Runs QEMU's check of an image's own tables, if its format has one (qcow2, vmdk). Without
/// it the missing part of a truncated image would read as zeroes.
pub(crate) fn check_image(
    driver: &str,
    image: &QemuImage,
    path: &Path,
    cancel: &AtomicBool,
) -> Result<()> {
    if !matches!(driver, "qcow2" | "vmdk") {
        return Ok(());
    }
    let what = format!("checking {}", path.display());
    let answer = ask(&["check", "-q", "--output=json"], image, &[], &what, cancel)?;
    match answer.status.and_then(|status| status.code()) {
        // 3: leaked clusters, which only cost space; 63: the format has no check.
        Some(0 | 3 | 63) => Ok(()),
        // One line per damaged cluster may follow: the first one is enough.
        Some(2) => Err(Error::with_source(
            ErrorKind::Io,
            format!("{} is damaged or truncated; qemu-img check shows details", path.display()),
            answer.messages.lines().next().unwrap_or_default().to_owned(),
        )),
        _ => Err(refused(&what, answer.messages)),
    }
}
