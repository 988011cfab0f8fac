//! The files of an appliance: members of an .ova, or files beside an .ovf.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use coldrise_block::{Context, Error, ErrorKind, Result};

use super::tar::{Member, members};
use crate::source::{ImageFormat, Location, open_named};

/// Where the files of an appliance are.
pub(super) enum Package {
    /// An archive.
    Archive { path: PathBuf, file: File, members: Vec<Member> },
    /// The folder of a descriptor.
    Folder { descriptor: PathBuf },
}

/// A file of an appliance: a range of an open file.
pub(super) struct Part {
    pub(super) name: String,
    pub(super) location: Location,
    pub(super) length_bytes: u64,
    file: File,
    offset_bytes: u64,
}

impl Part {
    /// Reads up to the part's end; returns the number of bytes.
    ///
    /// # Errors
    /// Errors of the system; also if the file has become shorter.
    pub(super) fn read_at(&self, buffer: &mut [u8], at: u64) -> Result<usize> {
        let length = (self.length_bytes - at).min(buffer.len() as u64) as usize;
        let read = self.file.read_exact_at(&mut buffer[..length], self.offset_bytes + at);
        read.context(|| format!("reading {} at offset {at}", self.location))?;
        Ok(length)
    }

    /// The text of a small file.
    ///
    /// # Errors
    /// `InvalidInput` for more than `most_bytes` and for other encodings than UTF-8.
    pub(super) fn text(&self, most_bytes: usize) -> Result<String> {
        let refused =
            |why: String| Error::new(ErrorKind::InvalidInput, format!("{}: {why}", self.location));
        if self.length_bytes > most_bytes as u64 {
            return Err(refused(format!("it is larger than {most_bytes} bytes")));
        }
        let mut bytes = vec![0; self.length_bytes as usize];
        self.read_at(&mut bytes, 0)?;
        let text =
            String::from_utf8(bytes).map_err(|_| refused("it is not UTF-8 text".to_owned()))?;
        Ok(text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text))
    }
}

impl Package {
    pub(super) fn open(path: &Path) -> Result<Package> {
        if !has_extension(path, "ova") {
            return Ok(Package::Folder { descriptor: path.to_path_buf() });
        }
        let what = || format!("reading {}", path.display());
        let file = open_named(path)?;
        let metadata = file.metadata().context(what)?;
        if !metadata.is_file() {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!("{} is not a file", path.display()),
            ));
        }
        let members = members(&file, metadata.len(), path)?;
        Ok(Package::Archive { path: path.to_path_buf(), file, members })
    }

    /// The descriptor.
    ///
    /// # Errors
    /// `InvalidInput` if there is none, or several.
    pub(super) fn descriptor(&self) -> Result<Part> {
        match self {
            Package::Archive { path, .. } => self.by_extension("ovf")?.ok_or_else(|| {
                let text =
                    format!("{}: there is no .ovf in it, so it is not an OVA", path.display());
                Error::new(ErrorKind::InvalidInput, text)
            }),
            Package::Folder { descriptor } => part_of_folder(descriptor, ImageFormat::Raw)?
                .ok_or_else(|| {
                    let text = format!("opening {}", descriptor.display());
                    Error::io(text, std::io::ErrorKind::NotFound.into())
                }),
        }
    }

    /// The manifest or the signature, by its extension.
    ///
    /// # Errors
    /// `InvalidInput` if there are several.
    pub(super) fn by_extension(&self, extension: &str) -> Result<Option<Part>> {
        let (path, found) = match self {
            Package::Archive { path, members, .. } => {
                let fits = |member: &&Member| has_extension(Path::new(&member.name), extension);
                (path, Vec::from_iter(members.iter().filter(fits)))
            }
            Package::Folder { descriptor } => {
                return part_of_folder(&descriptor.with_extension(extension), ImageFormat::Raw);
            }
        };
        match found[..] {
            [] => Ok(None),
            [only] => self.member(only).map(Some),
            _ => {
                let text = format!(
                    "{}: there are {} .{extension} files in it",
                    path.display(),
                    found.len()
                );
                Err(Error::new(ErrorKind::InvalidInput, text))
            }
        }
    }

    /// The file of this name; `None` if there is none.
    ///
    /// # Errors
    /// `InvalidInput` if it is not a plain file.
    pub(super) fn find(&self, name: &str) -> Result<Option<Part>> {
        match self {
            Package::Archive { members, .. } => {
                let found = members.iter().find(|member| member.name == name);
                found.map(|member| self.member(member)).transpose()
            }
            // A manifest may name anything.
            Package::Folder { .. } if name.contains(['/', '\0']) || name == ".." => Ok(None),
            Package::Folder { descriptor } => {
                part_of_folder(&descriptor.with_file_name(name), ImageFormat::Vmdk)
            }
        }
    }

    fn member(&self, member: &Member) -> Result<Part> {
        let Package::Archive { path, file, .. } = self else {
            return Err(Error::new(ErrorKind::Internal, "a folder has no members"));
        };
        let Member { name, offset_bytes, length_bytes } = member.clone();
        let file = file.try_clone().context(|| format!("reading {}", path.display()))?;
        let location = Location::Member {
            archive: path.clone(),
            name: name.clone(),
            offset_bytes,
            length_bytes,
        };
        Ok(Part { name, location, length_bytes, file, offset_bytes })
    }
}

/// True if the path has the extension, in any case.
pub(super) fn has_extension(path: &Path, extension: &str) -> bool {
    path.extension().is_some_and(|found| found.eq_ignore_ascii_case(extension))
}

fn part_of_folder(path: &Path, format: ImageFormat) -> Result<Option<Part>> {
    let what = || format!("opening {}", path.display());
    let not_plain = || {
        let text = format!("{} is not a plain file", path.display());
        Error::new(ErrorKind::InvalidInput, text)
    };
    // The descriptor names the file: a link would lead to one that the user did not name.
    match path.symlink_metadata() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        metadata => {
            if !metadata.context(what)?.is_file() {
                return Err(not_plain());
            }
        }
    }
    let file = open_named(path)?;
    let length_bytes = file.metadata().context(what)?.len();
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let location = Location::Image { path: path.to_path_buf(), format };
    Ok(Some(Part { name, location, length_bytes, file, offset_bytes: 0 }))
}
