//! Known content, tools and servers for the tests of this crate.

pub(crate) mod memory;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use coldrise_block::{Error, ExtentKind, Result};
use coldrise_ingest::SourceSpec;
use coldrise_ingest::source::{Source, SourceOptions, open_source};

/// 1 MiB.
pub(crate) const MIB: usize = 1 << 20;

/// A folder that is removed with the test.
pub(crate) fn folder() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("coldrise-test-").tempdir().unwrap()
}

/// Deterministic bytes that do not compress; `seed` must not be 0.
pub(crate) fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// A disk of `length` bytes: noise at the start, in the middle and at the very end,
/// zeroes elsewhere.
pub(crate) fn sparse_disk(seed: u64, length: usize) -> Vec<u8> {
    let mut disk = vec![0; length];
    let piece = 300_000.min(length / 5);
    disk[..piece].copy_from_slice(&noise(seed, piece));
    let middle = length / 2 + 1_234;
    disk[middle..middle + piece].copy_from_slice(&noise(seed + 1, piece));
    disk[length - 500..].copy_from_slice(&noise(seed + 2, 500));
    disk
}

/// Writes a disk as a raw file with holes where it is zero.
pub(crate) fn write_sparse(path: &Path, disk: &[u8]) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::create(path).unwrap();
    file.set_len(disk.len() as u64).unwrap();
    for (index, block) in disk.chunks(4096).enumerate() {
        if block.iter().any(|&byte| byte != 0) {
            file.write_all_at(block, index as u64 * 4096).unwrap();
        }
    }
}

/// Runs a tool that must succeed; returns its output.
pub(crate) fn run(tool: &str, arguments: &[&str]) -> String {
    let output = Command::new(tool)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|error| panic!("{tool} is needed for this test: {error}"));
    assert!(
        output.status.success(),
        "{tool} {arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

/// A path as text.
pub(crate) fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A server that ends with the test.
pub(crate) struct Server {
    child: Child,
    pub socket: PathBuf,
}

impl Server {
    /// Starts a server in the foreground and waits until it accepts connections.
    pub(crate) fn start(tool: &str, arguments: &[&str], socket: &Path) -> Server {
        let child = Command::new(tool)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| panic!("{tool} is needed for this test: {error}"));
        let mut server = Server { child, socket: socket.to_path_buf() };
        let started = Instant::now();
        while std::os::unix::net::UnixStream::connect(socket).is_err() {
            assert!(server.child.try_wait().unwrap().is_none(), "{tool} ended at once");
            assert!(started.elapsed() < Duration::from_secs(20), "{tool} does not listen");
            std::thread::sleep(Duration::from_millis(5));
        }
        server
    }

    /// nbdkit with a plugin and its parameters.
    pub(crate) fn nbdkit(folder: &Path, arguments: &[&str]) -> Server {
        let socket = folder.join("nbdkit.sock");
        let mut all = vec!["--foreground", "--unix", text(&socket)];
        all.extend_from_slice(arguments);
        Server::start("nbdkit", &all, &socket)
    }

    /// qemu-nbd, until it is killed.
    pub(crate) fn qemu_nbd(folder: &Path, arguments: &[&str]) -> Server {
        let socket = folder.join("qemu-nbd.sock");
        let option = format!("--socket={}", text(&socket));
        let mut all = vec!["--persistent", "--shared=8", option.as_str()];
        all.extend_from_slice(arguments);
        Server::start("qemu-nbd", &all, &socket)
    }

    pub(crate) fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", text(&self.socket))
    }

    /// Ends the server now.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.socket);
    }
}

/// Opens `DISK=…` with no options.
pub(crate) fn open(spec: &str) -> Result<Box<dyn Source + 'static>> {
    open_with(spec, &SourceOptions::default())
}

/// Opens `DISK=…`.
pub(crate) fn open_with(spec: &str, options: &SourceOptions) -> Result<Box<dyn Source + 'static>> {
    static NEVER: AtomicBool = AtomicBool::new(false);
    open_source(&SourceSpec::parse(spec)?, options, &NEVER)
}

/// The error of opening `DISK=…`.
pub(crate) fn open_error(spec: &str) -> Error {
    match open(spec) {
        Ok(_) => panic!("{spec} was opened"),
        Err(error) => error,
    }
}

/// Reads a source as a backup does: zeroes in its holes, in unaligned pieces. Returns the
/// content and the number of bytes read.
pub(crate) fn read_all(source: &dyn Source) -> (Vec<u8>, u64) {
    let size = source.size_bytes();
    let mut content = vec![0; size as usize];
    let mut reader = source.reader().unwrap();
    let (mut at, mut read) = (0, 0);
    while at < size {
        let extents = source.extents(at, size - at).unwrap();
        assert!(!extents.is_empty());
        for extent in extents {
            assert_eq!(extent.offset_bytes, at, "extents have no gaps");
            assert!(extent.length_bytes > 0 && extent.length_bytes <= size - at);
            let next = at + extent.length_bytes;
            if extent.kind == ExtentKind::Stored {
                reader.read_at(&mut content[at as usize..next as usize], at).unwrap();
                read += extent.length_bytes;
            }
            at = next;
        }
    }
    (content, read)
}

/// Compares without printing megabytes.
pub(crate) fn assert_same(actual: &[u8], expected: &[u8]) {
    assert_eq!(actual.len(), expected.len(), "lengths differ");
    if let Some(at) = (0..actual.len()).find(|&at| actual[at] != expected[at]) {
        panic!("byte {at} differs: {} instead of {}", actual[at], expected[at]);
    }
}
