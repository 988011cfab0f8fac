//! tgtd's control socket: the requests that tgtadm sends, without its command line, which every user
//! of the host could read the CHAP secret from.
//!
//! A request is a struct of 120 bytes in the host's byte order (usr/tgtadm.h of tgt, unchanged since
//! 2008), then `key=value` words. The answer is an error number and a length. Each request has a
//! connection of its own.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use coldrise_block::{Context, Error, ErrorKind, Result};

use super::iscsi::{Chap, Target};

const REQUEST_BYTES: u32 = 120;
const DRIVER: &[u8] = b"iscsi";
const DRIVER_BYTES: usize = 64;
/// tgtd opens files while it answers.
const PATIENCE: Duration = Duration::from_secs(30);

/// The object of a request, by tgt's numbers.
#[derive(Clone, Copy)]
enum Mode {
    System = 0,
    Target = 1,
    Device = 2,
    Portal = 3,
    Account = 7,
}

/// What is done with it, by tgt's numbers.
#[derive(Clone, Copy)]
enum Operation {
    New = 0,
    Delete = 1,
    Show = 2,
    Bind = 3,
    Update = 5,
}

/// A control socket.
pub(super) struct Control<'a> {
    socket: &'a Path,
}

impl Control<'_> {
    /// The control socket of a tgtd; it need not be there yet.
    pub(super) fn new(socket: &Path) -> Control<'_> {
        Control { socket }
    }

    /// Whether tgtd answers.
    pub(super) fn answers(&self) -> bool {
        self.call(Mode::System, Operation::Show, 0, 0, false, "").is_ok()
    }

    /// Makes the targets known, and only then listens on `listen` and no longer on `first`, with which
    /// tgtd was started: an initiator that logs in again after a crash must not find a target missing.
    ///
    /// # Errors
    /// `ToolFailed` if tgtd refuses a request.
    pub(super) fn set_up(
        &self,
        targets: &[Target],
        chap: Option<&Chap>,
        allowed: &[String],
        [first, listen]: [SocketAddr; 2],
    ) -> Result<()> {
        if let Some(chap) = chap {
            let account = format!("user={},password={}", chap.user(), chap.secret());
            self.must(Mode::Account, Operation::New, 0, 0, &account, "the CHAP user")?;
        }
        for (target, id) in targets.iter().zip(1..) {
            let what = target.address.as_str();
            let name = format!("targetname={}", target.name());
            self.must(Mode::Target, Operation::New, id, 0, &name, what)?;
            for (lun, number) in target.luns.iter().zip(1..) {
                let path = lun.path.display().to_string();
                if path.contains(',') {
                    let text = format!("tgtd takes no file such as {path}: set TMPDIR to another");
                    return Err(Error::new(ErrorKind::InvalidInput, text));
                }
                let what = format!("{what}/{}", lun.disk);
                let new = format!("path={path},bstype=rdwr");
                self.must(Mode::Device, Operation::New, id, number, &new, &what)?;
                // Trims free space in the session.
                let settings = format!(
                    "vendor_id=COLDRISE,product_id=VIRTUAL-DISK,thin_provisioning=1,readonly={},scsi_sn={}",
                    u8::from(target.is_read_only),
                    serial(&target.address, &lun.disk)
                );
                self.must(Mode::Device, Operation::Update, id, number, &settings, &what)?;
            }
            if let Some(chap) = chap {
                let user = format!("user={}", chap.user());
                self.must(Mode::Account, Operation::Bind, id, 0, &user, what)?;
            }
            let everybody = ["ALL".to_owned()];
            for client in if allowed.is_empty() { &everybody } else { allowed } {
                let client = format!("initiator-address={client}");
                self.must(Mode::Target, Operation::Bind, id, 0, &client, what)?;
            }
        }
        let portal = |address| format!("portal={address}");
        self.must(Mode::Portal, Operation::New, 0, 0, &portal(listen), &listen.to_string())?;
        // It fails if tgtd could not bind to it. tgtd then listens on every address, and must not keep running.
        self.must(Mode::Portal, Operation::Delete, 0, 0, &portal(first), &first.to_string())
    }

    /// Disconnects the initiators, closes the disks and ends tgtd, as far as it still answers.
    pub(super) fn end(&self, targets: usize) {
        for id in (1..).take(targets) {
            let _ = self.call(Mode::Target, Operation::Delete, id, 0, true, "");
        }
        let _ = self.call(Mode::System, Operation::Delete, 0, 0, false, "");
    }

    fn must(
        &self,
        mode: Mode,
        operation: Operation,
        target: i32,
        lun: u64,
        words: &str,
        what: &str,
    ) -> Result<()> {
        match self.call(mode, operation, target, lun, false, words)? {
            0 => Ok(()),
            code => Err(Error::new(
                ErrorKind::ToolFailed,
                format!("tgtd refuses to serve {what} (error {code}); the lines above say why"),
            )),
        }
    }

    /// Sends a request; returns tgtd's error number, 0 for none.
    fn call(
        &self,
        mode: Mode,
        operation: Operation,
        target: i32,
        lun: u64,
        is_forced: bool,
        words: &str,
    ) -> Result<u32> {
        let what = || format!("asking tgtd at {}", self.socket.display());
        let mut stream = UnixStream::connect(self.socket).context(what)?;
        stream.set_read_timeout(Some(PATIENCE)).context(what)?;
        stream.write_all(&request(mode, operation, target, lun, is_forced, words)).context(what)?;
        let mut answer = [0; 8];
        stream.read_exact(&mut answer).context(what)?;
        let [a, b, c, d, ..] = answer;
        Ok(u32::from_ne_bytes([a, b, c, d]))
    }
}

fn request(
    mode: Mode,
    operation: Operation,
    target: i32,
    lun: u64,
    is_forced: bool,
    words: &str,
) -> Vec<u8> {
    // A text ends with a zero.
    let text_bytes = if words.is_empty() { 0 } else { words.len() as u32 + 1 };
    let mut bytes = Vec::with_capacity((REQUEST_BYTES + text_bytes) as usize);
    bytes.extend((mode as u32).to_ne_bytes());
    bytes.extend((operation as u32).to_ne_bytes());
    bytes.extend(DRIVER);
    bytes.resize(bytes.len() + DRIVER_BYTES - DRIVER.len(), 0);
    bytes.extend((REQUEST_BYTES + text_bytes).to_ne_bytes());
    bytes.extend(target.to_ne_bytes());
    // The iSCSI session.
    bytes.extend(0_u64.to_ne_bytes());
    bytes.extend(lun.to_ne_bytes());
    // Connection, host, type of device (a disk), direction of the account (incoming), packing.
    bytes.extend([0; 20]);
    bytes.extend(u32::from(is_forced).to_ne_bytes());
    debug_assert_eq!(bytes.len(), REQUEST_BYTES as usize);
    bytes.extend(words.as_bytes());
    if text_bytes > 0 {
        bytes.push(0);
    }
    bytes
}

/// A serial number of the disk: the end of its address, as tgtd keeps 36 characters.
fn serial(address: &str, disk: &str) -> String {
    const MOST_CHARS: usize = 36;
    let whole = format!("{address}/{disk}").replace([',', '='], "-");
    whole.chars().skip(whole.chars().count().saturating_sub(MOST_CHARS)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_has_tgts_layout() {
        let bytes = request(Mode::Device, Operation::Update, 7, 3, true, "readonly=1");
        assert_eq!(bytes.len(), 120 + 11);
        let number = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
        assert_eq!((number(0), number(4)), (2, 5));
        assert_eq!(&bytes[8..14], b"iscsi\0");
        assert_eq!((number(72), number(76)), (131, 7));
        assert_eq!(u64::from_ne_bytes(bytes[88..96].try_into().unwrap()), 3);
        assert_eq!(number(116), 1);
        assert_eq!(&bytes[120..], b"readonly=1\0");
    }
}
