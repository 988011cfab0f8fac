//! Sources of a passphrase. It is never an argument and never logged.

use std::ffi::OsStr;
use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use coldrise_block::{Context, Error, ErrorKind, Result};
use zeroize::Zeroizing;

/// Maximum length of a passphrase, in bytes.
pub(crate) const MAX_PASSPHRASE_BYTES: usize = 4096;

/// The credential of a unit: the file `passphrase` of the folder that the unit loads as `coldrise`.
const UNIT_CREDENTIAL: &str = "coldrise_passphrase";

/// A passphrase; its memory is wiped when it is dropped.
#[derive(Clone)]
pub struct Passphrase(Zeroizing<Vec<u8>>);

impl Passphrase {
    /// Takes the bytes unchanged.
    ///
    /// # Errors
    /// `ErrorKind::InvalidInput` if empty or over [`MAX_PASSPHRASE_BYTES`].
    pub fn new(bytes: Vec<u8>) -> Result<Self> {
        let bytes = Zeroizing::new(bytes);
        if bytes.is_empty() {
            return Err(Error::new(ErrorKind::InvalidInput, "the passphrase is empty"));
        }
        if bytes.len() > MAX_PASSPHRASE_BYTES {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!("the passphrase is longer than {MAX_PASSPHRASE_BYTES} bytes"),
            ));
        }
        Ok(Passphrase(bytes))
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Reads to the end, but not more than the maximum length, and strips one trailing newline.
    fn read_from(source: impl Read) -> std::io::Result<Zeroizing<Vec<u8>>> {
        // Reserved at full size, so that growing leaves no copies behind.
        let mut bytes = Zeroizing::new(Vec::with_capacity(MAX_PASSPHRASE_BYTES + 64));
        source.take(MAX_PASSPHRASE_BYTES as u64 + 3).read_to_end(&mut bytes)?;
        if bytes.last() == Some(&b'\n') {
            bytes.pop();
            if bytes.last() == Some(&b'\r') {
                bytes.pop();
            }
        }
        Ok(bytes)
    }
}

impl fmt::Debug for Passphrase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Passphrase(hidden)")
    }
}

/// A passphrase that several steps need and that is read once: its source may be a pipe or a
/// prompt.
pub struct ReadOnce<'a> {
    source: &'a PassphraseSource,
    read: std::cell::OnceCell<Option<Passphrase>>,
}

impl<'a> ReadOnce<'a> {
    /// Reads `source` when it is needed first.
    pub fn new(source: &'a PassphraseSource) -> ReadOnce<'a> {
        ReadOnce { source, read: std::cell::OnceCell::new() }
    }

    /// Errors: as [`PassphraseSource::read`].
    pub fn get(&self) -> Result<Option<&Passphrase>> {
        if self.read.get().is_none() {
            let _ = self.read.set(self.source.read()?);
        }
        Ok(self.read.get().and_then(Option::as_ref))
    }
}

/// The source of a passphrase.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PassphraseSource {
    /// The first [`MAX_PASSPHRASE_BYTES`] of a file, without a trailing newline.
    File(PathBuf),
    /// The output of a command that `sh -c` runs.
    Command(String),
    /// No passphrase.
    None,
}

impl PassphraseSource {
    /// The credential `coldrise_passphrase` that systemd gives to a unit; [`PassphraseSource::None`]
    /// outside of units, and if the unit has no such credential.
    pub fn of_unit() -> PassphraseSource {
        PassphraseSource::credential_in(std::env::var_os("CREDENTIALS_DIRECTORY").as_deref())
    }

    fn credential_in(folder: Option<&OsStr>) -> PassphraseSource {
        let path = folder.map(|folder| Path::new(folder).join(UNIT_CREDENTIAL));
        path.filter(|path| path.is_file()).map_or(PassphraseSource::None, PassphraseSource::File)
    }

    /// Reads the passphrase; `None` if the source is [`PassphraseSource::None`].
    ///
    /// # Errors
    /// `InvalidInput` for an empty or too long passphrase; `ToolFailed` for a command that fails;
    /// errors of the operating system on the file.
    pub fn read(&self) -> Result<Option<Passphrase>> {
        match self {
            PassphraseSource::None => Ok(None),
            PassphraseSource::File(path) => {
                let what = || format!("reading the passphrase file {}", path.display());
                let file = std::fs::File::open(path).context(what)?;
                let mut bytes = Passphrase::read_from(file).context(what)?;
                Passphrase::new(std::mem::take(&mut *bytes)).context(what).map(Some)
            }
            PassphraseSource::Command(command) => {
                let what = || "running the passphrase command";
                // Not as an argument, because every process can read arguments.
                let mut child = Command::new("sh")
                    .args(["-c", "eval \"$COLDRISE_PASSPHRASE_COMMAND\""])
                    .env("COLDRISE_PASSPHRASE_COMMAND", command)
                    .stdin(Stdio::null())
                    .stdout(Stdio::piped())
                    .spawn()
                    .context(what)?;
                let read = child.stdout.take().map(Passphrase::read_from);
                let status = child.wait().context(what)?;
                if !status.success() {
                    return Err(Error::new(
                        ErrorKind::ToolFailed,
                        format!("the passphrase command failed ({status})"),
                    ));
                }
                let mut bytes = read.transpose().context(what)?.unwrap_or_default();
                Passphrase::new(std::mem::take(&mut *bytes)).context(what).map(Some)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from_file(content: &[u8]) -> Result<Option<Passphrase>> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), content).unwrap();
        PassphraseSource::File(file.path().to_owned()).read()
    }

    #[test]
    fn the_credential_of_a_unit_counts_if_there_is_one() {
        let folder = tempfile::tempdir().unwrap();
        let given = || PassphraseSource::credential_in(Some(folder.path().as_os_str())).read();
        assert!(given().unwrap().is_none());
        assert!(PassphraseSource::credential_in(None).read().unwrap().is_none());
        std::fs::write(folder.path().join(UNIT_CREDENTIAL), "horse\n").unwrap();
        assert!(given().unwrap().is_some());
    }

    #[test]
    fn a_file_gives_its_content_without_the_line_end() {
        assert_eq!(from_file(b"secret\n").unwrap().unwrap().as_bytes(), b"secret");
        assert_eq!(from_file(b"secret\r\n").unwrap().unwrap().as_bytes(), b"secret");
        assert_eq!(from_file(b" two words \n\n").unwrap().unwrap().as_bytes(), b" two words \n");
        let longest = vec![b'x'; MAX_PASSPHRASE_BYTES];
        assert_eq!(from_file(&longest).unwrap().unwrap().as_bytes(), longest);
    }

    #[test]
    fn empty_long_and_missing_files_are_refused() {
        for content in [&b""[..], b"\n", b"\r\n", &[b'x'; MAX_PASSPHRASE_BYTES + 1], &[0; 99_999]] {
            assert_eq!(from_file(content).unwrap_err().kind(), ErrorKind::InvalidInput);
        }
        let missing = PassphraseSource::File("/nonexistent/passphrase".into()).read().unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::NotFound);
    }

    #[test]
    fn a_passphrase_is_read_from_the_output_of_a_command() {
        let read = |command: &str| PassphraseSource::Command(command.into()).read();
        assert_eq!(read("echo secret").unwrap().unwrap().as_bytes(), b"secret");
        assert_eq!(read("echo secret; exit 3").unwrap_err().kind(), ErrorKind::ToolFailed);
        assert_eq!(read("true").unwrap_err().kind(), ErrorKind::InvalidInput);
    }

    #[test]
    fn debug_does_not_show_the_passphrase() {
        let shown = format!("{:?}", Passphrase::new(b"secret".to_vec()).unwrap());
        assert!(!shown.contains("secret"));
    }
}
