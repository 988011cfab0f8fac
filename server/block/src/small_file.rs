//! Files that users name, read whole: a device or an endless pipe must not fill the memory.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::{Context, Error, ErrorKind, Result};

/// Reads a file or a pipe of at most `max_bytes`.
///
/// # Errors
/// `InvalidInput` if there is more; errors of the operating system.
pub fn read_small_file(path: &Path, max_bytes: u64) -> Result<Vec<u8>> {
    let reading = || format!("reading {}", path.display());
    read_at_most(File::open(path).context(reading)?, path, max_bytes)
}

/// The same for what is open already.
pub fn read_at_most(file: impl Read, path: &Path, max_bytes: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let taken = file.take(max_bytes.saturating_add(1)).read_to_end(&mut bytes);
    taken.context(|| format!("reading {}", path.display()))?;
    if bytes.len() as u64 > max_bytes {
        let text = format!("{} is larger than {max_bytes} bytes", path.display());
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endless_file_is_refused() {
        let error = read_small_file(Path::new("/dev/zero"), 100).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(error.message().contains("/dev/zero is larger than 100 bytes"), "{error}");
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, [1; 100]).unwrap();
        assert_eq!(read_small_file(&path, 100).unwrap().len(), 100);
        assert!(read_small_file(&path, 99).is_err());
    }
}
