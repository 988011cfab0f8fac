//! The conversation with the machine. Nothing that it says is believed unchecked.

use std::collections::BTreeMap;
use std::io::{ErrorKind as IoErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_files_protocol::{
    Answer, CONTENT_BYTES, Device, Entry, EntryKind, Failure, Found, Group, MAGIC, MAX_DEVICES,
    MAX_FRAME_BYTES, NONCE_BYTES, Request, frame,
};

use super::names::{nonsense, printable};
use super::paths::OpenFolders;

/// Maximum number of entries that one command takes.
const MAX_ENTRIES: u64 = 5_000_000;
/// Maximum length of the paths and targets of a listing or a walk, in bytes: callers keep them.
const MAX_LISTED_BYTES: usize = 256 << 20;
/// How often a waiting command looks after the machine.
const INTERVAL: Duration = Duration::from_millis(200);
/// The machine may be silent for this long: it may replay a long journal.
const SILENCE: Duration = Duration::from_secs(120);
/// After the end of a conversation, who looks after the machine knows why within this time.
const REASON_PATIENCE: Duration = Duration::from_secs(5);
const REASON_INTERVAL: Duration = Duration::from_millis(20);
/// Bytes of earlier answers that are dropped before a greeting.
const MAX_DROPPED_BYTES: u64 = 64 << 20;

/// Bounds of one command.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The most content that is taken, in bytes.
    pub content_bytes: u64,
    /// The most time for the whole conversation.
    pub time: Duration,
}

/// Something that a walk or a read brings.
#[derive(Debug)]
pub enum Received<'a> {
    /// The next file, folder or link.
    Entry(&'a Entry),
    /// The next bytes of the last file. All of them together are as many as its entry says.
    Content(&'a [u8]),
    /// The unreadable parts, and the reasons. Missing bytes come as zeroes.
    Unread(&'a str),
}

/// A conversation.
pub struct Client<'a> {
    stream: UnixStream,
    /// Fails if the machine has ended, with the reason, or the user cancels.
    look_after: Box<dyn FnMut() -> Result<()> + 'a>,
    limits: Limits,
    until: Instant,
    bytes: Vec<u8>,
    /// The part of `bytes` that is taken.
    taken: usize,
    /// What devices lack. It is added to errors about them.
    lacks: BTreeMap<u64, String>,
}

impl<'a> Client<'a> {
    /// Greets the machine, which may still be starting. `look_after` is called all the time.
    ///
    /// # Errors
    /// `ToolFailed` if it does not answer in time, the errors of `look_after`.
    pub fn greet(
        stream: UnixStream,
        patience: Duration,
        limits: Limits,
        look_after: impl FnMut() -> Result<()> + 'a,
    ) -> Result<Client<'a>> {
        stream.set_read_timeout(Some(INTERVAL)).context(|| "preparing a socket")?;
        let now = Instant::now();
        let mut client = Client {
            stream,
            look_after: Box::new(look_after),
            limits,
            until: now + limits.time,
            bytes: Vec::new(),
            taken: 0,
            lacks: BTreeMap::new(),
        };
        let mut greeting = MAGIC.to_vec();
        let mut nonce = [0; NONCE_BYTES];
        rustix::rand::getrandom(&mut nonce, rustix::rand::GetRandomFlags::empty())
            .map_err(std::io::Error::from)
            .context(|| "taking random bytes")?;
        greeting.extend_from_slice(&nonce);
        client.write(&greeting)?;
        let mut dropped = 0;
        loop {
            let place = client.bytes.windows(greeting.len()).position(|bytes| bytes == greeting);
            if let Some(place) = place {
                client.taken = place + greeting.len();
                return Ok(client);
            }
            let kept = client.bytes.len().min(greeting.len() - 1);
            dropped += (client.bytes.len() - kept) as u64;
            client.bytes.drain(..client.bytes.len() - kept);
            if dropped > MAX_DROPPED_BYTES {
                return Err(nonsense("no greeting"));
            }
            client.receive(patience)?;
        }
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let written = self.stream.write_all(bytes);
        written.map_err(|_| self.end_reason())
    }

    /// Why the machine has ended.
    fn end_reason(&mut self) -> Error {
        let until = Instant::now() + REASON_PATIENCE;
        while Instant::now() < until {
            if let Err(reason) = (self.look_after)() {
                return reason;
            }
            std::thread::sleep(REASON_INTERVAL);
        }
        let text = "the machine that reads the file systems has closed the connection";
        Error::new(ErrorKind::ToolFailed, text).advise("run the command again")
    }

    /// Adds what has arrived to `bytes`.
    fn receive(&mut self, patience: Duration) -> Result<()> {
        let began = Instant::now();
        self.bytes.drain(..self.taken);
        self.taken = 0;
        let mut piece = [0; 64 << 10];
        loop {
            match self.stream.read(&mut piece) {
                Ok(0) => return Err(self.end_reason()),
                Ok(count) => {
                    self.bytes.extend_from_slice(piece.get(..count).unwrap_or_default());
                    if Instant::now() > self.until {
                        return Err(late("took too long", self.limits.time));
                    }
                    return Ok(());
                }
                Err(error) => match error.kind() {
                    IoErrorKind::Interrupted | IoErrorKind::WouldBlock | IoErrorKind::TimedOut => {}
                    IoErrorKind::ConnectionReset => return Err(self.end_reason()),
                    _ => {
                        return Err(error)
                            .context(|| "listening to the machine that reads the file systems");
                    }
                },
            }
            (self.look_after)()?;
            if began.elapsed() > patience {
                return Err(late("was silent for too long", patience));
            }
        }
    }

    fn take(&mut self, count: usize) -> Result<Vec<u8>> {
        while self.bytes.len() - self.taken < count {
            self.receive(SILENCE)?;
        }
        let end = self.taken + count;
        let taken = self.bytes.get(self.taken..end).unwrap_or_default().to_vec();
        self.taken = end;
        Ok(taken)
    }

    fn answer(&mut self) -> Result<Answer> {
        let length =
            self.take(4)?.try_into().map_or(usize::MAX, |bytes| u32::from_le_bytes(bytes) as usize);
        if length > MAX_FRAME_BYTES {
            return Err(nonsense("an overlong message"));
        }
        let body = self.take(length)?;
        Answer::parse(&body).map_err(|_| nonsense("a malformed message"))
    }

    fn ask(&mut self, request: &Request) -> Result<()> {
        self.write(&frame(&request.body()))
    }

    /// The devices, and the volume groups with which something is wrong. A key, if not empty, opens encrypted ones.
    ///
    /// # Errors
    /// Those of the conversation.
    pub(super) fn devices(&mut self, key: &[u8]) -> Result<(Vec<Device>, Vec<Group>)> {
        self.ask(&Request::Devices(key.to_vec()))?;
        self.lacks.clear();
        let (mut devices, mut groups) = (Vec::new(), Vec::new());
        loop {
            match self.answer()? {
                Answer::Device(device) if devices.len() < MAX_DEVICES => devices.push(device),
                Answer::Group(group) if groups.len() < MAX_DEVICES => groups.push(group),
                Answer::End => return Ok((devices, groups)),
                Answer::Failed(failure, text) => return Err(refusal(failure, &text)),
                _ => return Err(nonsense("something else than devices")),
            }
        }
    }

    /// Errors about a device say this, too: what it lacks.
    pub(super) fn explain(&mut self, device: u64, lack: String) {
        self.lacks.insert(device, lack);
    }

    fn refusal(&self, device: u64, failure: Failure, text: &str) -> Error {
        match (failure, self.lacks.get(&device)) {
            (Failure::Unreadable, Some(lack)) => refusal(failure, &format!("{text}: {lack}")),
            _ => refusal(failure, text),
        }
    }

    /// Shows only these disks to a machine with those of several points. Closes all open file systems.
    ///
    /// # Errors
    /// `Unsupported` if something cannot be closed: start another machine.
    pub fn select(&mut self, first: u64, count: u64) -> Result<()> {
        self.ask(&Request::Select { first, count })?;
        match self.answer()? {
            Answer::End => Ok(()),
            Answer::Failed(failure, text) => Err(refusal(failure, &text)),
            _ => Err(nonsense("something else than an end")),
        }
    }

    /// Makes a device readable.
    ///
    /// # Errors
    /// `Unsupported` if it cannot be mounted.
    pub fn open(&mut self, device: u64) -> Result<Found> {
        self.ask(&Request::Open(device))?;
        let found = match self.answer()? {
            Answer::Opened(found) => found,
            Answer::Failed(failure, text) => return Err(self.refusal(device, failure, &text)),
            _ => return Err(nonsense("something else than a device")),
        };
        match self.answer()? {
            Answer::End => Ok(found),
            _ => Err(nonsense("more than a device")),
        }
    }

    /// The path and, of a folder, what it holds.
    ///
    /// # Errors
    /// As [`Client::walk`].
    pub fn list(
        &mut self,
        device: u64,
        path: &[u8],
        take: impl FnMut(Received<'_>) -> Result<()>,
    ) -> Result<()> {
        self.converse(device, &Request::List(device, path.to_vec()), false, take)
    }

    /// The path and everything below it.
    ///
    /// # Errors
    /// `NotFound`, `Unsupported`, `ToolFailed` for answers that a sound machine never gives; the errors of `take`.
    pub fn walk(
        &mut self,
        device: u64,
        path: &[u8],
        take: impl FnMut(Received<'_>) -> Result<()>,
    ) -> Result<()> {
        self.converse(device, &Request::Walk(device, path.to_vec()), false, take)
    }

    /// As [`Client::walk`], with the files' content.
    ///
    /// # Errors
    /// As [`Client::walk`].
    pub fn read(
        &mut self,
        device: u64,
        path: &[u8],
        take: impl FnMut(Received<'_>) -> Result<()>,
    ) -> Result<()> {
        self.converse(device, &Request::Read(device, path.to_vec()), true, take)
    }

    fn converse(
        &mut self,
        device: u64,
        request: &Request,
        has_content: bool,
        mut take: impl FnMut(Received<'_>) -> Result<()>,
    ) -> Result<()> {
        self.ask(request)?;
        let mut folders = OpenFolders::default();
        let (mut entries, mut listed_bytes, mut content_bytes) = (0, 0, 0_u64);
        // Counts for the last file.
        let mut missing_bytes = 0_u64;
        // Said once.
        let mut lack = self.lacks.get(&device).cloned();
        loop {
            let answer = self.answer()?;
            if !matches!(answer, Answer::Content(_)) {
                entries += 1;
                if entries > MAX_ENTRIES {
                    return Err(too_many());
                }
                if missing_bytes > 0 {
                    if !matches!(answer, Answer::Unread(_)) {
                        take(Received::Unread("a file is shorter than its folder says"))?;
                    }
                    fill(missing_bytes, &mut take)?;
                    missing_bytes = 0;
                }
            }
            match answer {
                Answer::Entry(entry) => {
                    folders.admit(&entry)?;
                    listed_bytes += entry.path.len() + entry.target.len();
                    if !has_content && listed_bytes > MAX_LISTED_BYTES {
                        return Err(too_many());
                    }
                    if has_content && entry.kind == EntryKind::File {
                        missing_bytes = entry.size_bytes;
                        content_bytes = content_bytes.saturating_add(entry.size_bytes);
                        if content_bytes > self.limits.content_bytes {
                            return Err(too_much(self.limits.content_bytes));
                        }
                    }
                    take(Received::Entry(&entry))?;
                }
                Answer::Content(bytes) => {
                    let count = bytes.len() as u64;
                    if count == 0 || count > missing_bytes {
                        return Err(nonsense("more content than a file has"));
                    }
                    missing_bytes -= count;
                    take(Received::Content(&bytes))?;
                }
                Answer::Unread(text) => {
                    let lack = lack.take().map(|lack| format!(": {lack}")).unwrap_or_default();
                    take(Received::Unread(&(printable(&text) + &lack)))?;
                }
                Answer::End => return Ok(()),
                Answer::Failed(failure, text) => return Err(self.refusal(device, failure, &text)),
                Answer::Device(_) | Answer::Group(_) | Answer::Opened(_) => {
                    return Err(nonsense("a device"));
                }
            }
        }
    }
}

/// Zeroes in place of bytes that could not be read.
fn fill(mut missing: u64, take: &mut impl FnMut(Received<'_>) -> Result<()>) -> Result<()> {
    let zeroes = [0; CONTENT_BYTES];
    while missing > 0 {
        let count = missing.min(CONTENT_BYTES as u64);
        take(Received::Content(zeroes.get(..count as usize).unwrap_or_default()))?;
        missing -= count;
    }
    Ok(())
}

fn refusal(failure: Failure, text: &str) -> Error {
    let kind = match failure {
        Failure::NotFound => ErrorKind::NotFound,
        Failure::WrongKind => ErrorKind::InvalidInput,
        Failure::Unreadable => ErrorKind::Unsupported,
    };
    Error::new(kind, printable(text))
}

fn late(what: &str, limit: Duration) -> Error {
    let text = format!("the machine that reads the file systems {what} ({} s)", limit.as_secs());
    Error::new(ErrorKind::ToolFailed, text)
}

fn too_many() -> Error {
    let text =
        "there are too many files (more than 5,000,000, or 256 MiB of names): name a folder below";
    Error::new(ErrorKind::Unsupported, text)
}

fn too_much(limit: u64) -> Error {
    let text = format!("the files are larger than {limit} bytes in all");
    Error::new(ErrorKind::Unsupported, text).advise(
        "the limit is --max-size, or what the machine's disks have: a file could fill this host",
    )
}
