//! Small documents of a repository that are sealed with its key, each in a file: links, hosts.
//!
//! ```text
//!   REPOSITORY/FOLDER/NAME.KIND    a document, as JSON
//!   REPOSITORY/FOLDER/NAME         a secret
//! ```
//!
//! A stolen drive gives no access by them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use coldrise_block::{Context, Error, ErrorKind, Result, remove_if_present, replace_file};
use serde::Serialize;
use serde::de::DeserializeOwned;
use zeroize::Zeroizing;

use crate::{MachineName, Repository};

/// A folder of documents. Its names have the form of machine names.
#[derive(Clone)]
pub struct SealedFolder {
    repository: Arc<Repository>,
    folder: PathBuf,
}

impl SealedFolder {
    /// Opens it; nothing is read yet.
    pub fn new(repository: &Arc<Repository>, folder: &str) -> SealedFolder {
        let folder = repository.path().join(folder);
        SealedFolder { repository: Arc::clone(repository), folder }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.folder
    }

    /// A secret. The first call makes it; of two processes the first one counts.
    ///
    /// # Errors
    /// `Corrupt` if it was changed; errors of the drive, and of `make`.
    pub fn secret(
        &self,
        name: &str,
        make: impl FnOnce() -> Result<Zeroizing<Vec<u8>>>,
    ) -> Result<Zeroizing<Vec<u8>>> {
        let path = self.folder.join(name);
        if !path.exists() {
            let sealed = self.repository.encrypt_document(name, &make()?)?;
            self.make()?;
            let own = self.folder.join(format!("{name}-{}", std::process::id()));
            replace_file(&own, &sealed)?;
            let linked = std::fs::hard_link(&own, &path);
            let removed = remove_if_present(&own);
            match linked {
                Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                    return Err(error).context(|| format!("making {}", path.display()));
                }
                _ => removed?,
            };
        }
        let sealed = std::fs::read(&path).context(|| format!("reading {}", path.display()))?;
        self.repository.decrypt_document(name, &sealed).map(Zeroizing::new)
    }

    /// Whether there is a document.
    pub fn has(&self, name: &MachineName, kind: &str) -> bool {
        self.file(name, kind).exists()
    }

    /// Writes a document, durably.
    ///
    /// # Errors
    /// Errors of the drive.
    pub fn put<T: Serialize>(&self, name: &MachineName, kind: &str, document: &T) -> Result<()> {
        let json = serde_json::to_vec(document).map_err(|error| {
            Error::with_source(ErrorKind::Internal, "writing a document", error)
        })?;
        let sealed = self.repository.encrypt_document(&format!("{kind} {name}"), &json)?;
        self.make()?;
        replace_file(&self.file(name, kind), &sealed)
    }

    /// Removes a document. Returns whether there was one.
    ///
    /// # Errors
    /// Errors of the drive.
    pub fn remove(&self, name: &MachineName, kind: &str) -> Result<bool> {
        remove_if_present(&self.file(name, kind))
    }

    /// The documents of a kind, by name.
    ///
    /// # Errors
    /// `Corrupt` if one was changed; errors of the drive.
    pub fn documents<T: DeserializeOwned>(&self, kind: &str) -> Result<Vec<T>> {
        let what = || format!("reading {}", self.folder.display());
        let entries = match std::fs::read_dir(&self.folder) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.context(what)?,
        };
        let mut names = Vec::new();
        for entry in entries {
            let name = entry.context(what)?.file_name();
            let name = name.to_str().and_then(|name| name.strip_suffix(kind)?.strip_suffix('.'));
            names.extend(name.map(MachineName::parse).transpose()?);
        }
        names.sort();
        let found = names.iter().map(|name| self.document(name, kind));
        // One may be removed meanwhile.
        let is_gone = |found: &Result<T>| {
            found.as_ref().is_err_and(|error| error.kind() == ErrorKind::NotFound)
        };
        found.filter(|found| !is_gone(found)).collect()
    }

    /// One document.
    ///
    /// # Errors
    /// `NotFound`, and those of [`SealedFolder::documents`].
    pub fn document<T: DeserializeOwned>(&self, name: &MachineName, kind: &str) -> Result<T> {
        let path = self.file(name, kind);
        let what = || format!("reading {}", path.display());
        let sealed = std::fs::read(&path).context(what)?;
        let json = self.repository.decrypt_document(&format!("{kind} {name}"), &sealed);
        let json = json.map_err(|error| error.context(path.display()))?;
        serde_json::from_slice(&json)
            .map_err(|error| Error::with_source(ErrorKind::Corrupt, what(), error))
    }

    fn file(&self, name: &MachineName, kind: &str) -> PathBuf {
        self.folder.join(format!("{name}.{kind}"))
    }

    fn make(&self) -> Result<()> {
        match std::fs::create_dir(&self.folder) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                Err(error).context(|| format!("making {}", self.folder.display()))
            }
            _ => Ok(()),
        }
    }
}
