//! Queries `qemu-img` about one image.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_host::{Limits, MAX_MESSAGES_BYTES, ProgramEnd, ProgramStart, ScratchSpace};
use serde_json::Value;

use super::{QemuImage, plain_message, refused};

/// How often the cancel flag is checked while `qemu-img` works.
const CANCEL_INTERVAL: Duration = Duration::from_millis(50);

/// The answer of `qemu-img`.
pub(super) struct Answer {
    pub(super) end: ProgramEnd,
    output: String,
    pub(super) messages: String,
}

/// Runs `qemu-img` with `words`, the image's name and `more`, on the host of the folder. The name is removed from its
/// messages.
pub(super) fn ask(
    space: &ScratchSpace,
    words: &[&str],
    image: &QemuImage,
    more: &[&str],
    what: &str,
    cancel: &AtomicBool,
) -> Result<Answer> {
    let is_change = image.files.iter().any(|file| file.is_writable);
    let limits = if is_change { Limits::of_change } else { Limits::of_question };
    let limits = limits(image.allocated_bytes, image.files.len());
    let name = image.name();
    let words = words.iter().chain([&&*name]).chain(more).map(|word| (*word).to_owned()).collect();
    let program = space.start(ProgramStart {
        program: "qemu-img".to_owned(),
        words,
        bounds: Some(image.bounds(limits)),
        ..Default::default()
    })?;
    loop {
        let state = program.state(CANCEL_INTERVAL)?;
        if cancel.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Interrupted, "cancelled"));
        }
        let Some(end) = state.end else { continue };
        if let Some(why) = end.limit_reached(&limits) {
            return Err(refused(what, why));
        }
        let messages = plain_message(&state.messages, &name);
        return Ok(Answer { end, output: state.output, messages });
    }
}

/// The answer of `qemu-img info` as JSON. It opens only the image itself.
pub(crate) fn image_facts(
    space: &ScratchSpace,
    image: &QemuImage,
    what: &str,
    cancel: &AtomicBool,
) -> Result<Value> {
    let answer = ask(space, &["info", "--output=json"], image, &[], what, cancel)?;
    if answer.end != ProgramEnd::Code(0) {
        return Err(refused(what, answer.messages));
    }
    serde_json::from_str(&answer.output).map_err(|error| {
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
    space: &ScratchSpace,
    driver: &str,
    image: &QemuImage,
    path: &Path,
    cancel: &AtomicBool,
) -> Result<()> {
    if !matches!(driver, "qcow2" | "vmdk") {
        return Ok(());
    }
    let what = format!("checking {}", path.display());
    let answer = ask(space, &["check", "-q", "--output=json"], image, &[], &what, cancel)?;
    match answer.end {
        // 3: leaked clusters, which only cost space; 63: the format has no check.
        ProgramEnd::Code(0 | 3 | 63) => Ok(()),
        // One line per damaged cluster may follow: the first one is enough.
        ProgramEnd::Code(2) => Err(Error::with_source(
            ErrorKind::Io,
            format!("{} is damaged or truncated; qemu-img check shows details", path.display()),
            answer.messages.lines().next().unwrap_or_default().to_owned(),
        )),
        _ => Err(refused(&what, first_of(&answer.messages))),
    }
}

/// The first whole line, and how many follow: only the end of many messages is kept.
fn first_of(messages: &str) -> String {
    let is_cut = messages.len() >= MAX_MESSAGES_BYTES;
    let mut lines = messages.lines().skip(usize::from(is_cut));
    let first = lines.next().unwrap_or(messages);
    match lines.count() {
        0 => first.to_owned(),
        more => format!(
            "{first} ({}{more} more messages: qemu-img check)",
            if is_cut { "more than " } else { "" }
        ),
    }
}
