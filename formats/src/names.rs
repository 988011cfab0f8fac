//! The names of an image's files.

use crate::{Error, Format, Result};

/// Longest file name that file systems accept, in bytes.
const MAX_NAME_BYTES: usize = 255;
/// Longest data file name that QEMU accepts in a qcow2 header, in bytes.
const MAX_REFERENCE_BYTES: usize = 1023;

/// The names of an image's files: the image itself and, in some formats, a
/// companion that holds the data. They are names, not paths: both files lie in
/// one folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Names {
    format: Format,
    image: String,
    companion: Option<String>,
    reference: Option<String>,
}

impl Names {
    /// The names of `disk` in the served tree: `vda.vhdx`; `vda.vmdk` with
    /// `vda-flat.vmdk`; `vda.external.qcow2` with `vda.raw`.
    pub fn in_tree(format: Format, disk: &str) -> Result<Self> {
        Names::new(format, format!("{disk}{}", format.suffix()), companion(format, disk))
    }

    /// The names for the image file `image`: the companion takes its name
    /// without the format's suffix or its last extension.
    pub fn beside(format: Format, image: &str) -> Result<Self> {
        let stem = image.strip_suffix(format.suffix());
        let stem = stem.or_else(|| Some(image.rsplit_once('.')?.0)).unwrap_or(image);
        let mut beside = companion(format, stem);
        // The image and its companion must not share a name.
        if let Some(beside) = beside.as_mut().filter(|beside| *beside == image) {
            beside.push_str(".data");
        }
        Names::new(format, image.to_owned(), beside)
    }

    fn new(format: Format, image: String, companion: Option<String>) -> Result<Self> {
        for name in std::iter::once(&image).chain(&companion) {
            if let Some(reason) = fault(name) {
                return Err(Error::FileName { name: name.clone(), reason });
            }
        }
        Ok(Names { format, image, companion, reference: None })
    }

    /// Stores this path as the data file's name in a qcow2 image. QEMU looks for
    /// a bare name in its own working directory, not in the image's, so a caller
    /// that knows the final location passes the whole path. VMDK readers look
    /// beside the descriptor; other formats ignore the path.
    ///
    /// # Errors
    /// `Error::FileName` where QEMU would not accept it as a path.
    pub fn with_reference(mut self, path: &str) -> Result<Self> {
        let fault = if path.len() > MAX_REFERENCE_BYTES {
            Some("it is longer than 1023 bytes")
        } else if path.chars().any(char::is_control) {
            Some("it has a control character")
        } else {
            // A colon after the first slash is part of a path.
            path.split('/').next().filter(|first| first.contains(':')).map(|_| PROTOCOL)
        };
        if let Some(reason) = fault {
            return Err(Error::FileName { name: path.to_owned(), reason });
        }
        self.reference = Some(path.to_owned());
        Ok(self)
    }

    /// The format of the files.
    pub fn format(&self) -> Format {
        self.format
    }

    /// The image: the file that a reader opens.
    pub fn image(&self) -> &str {
        &self.image
    }

    /// The file with the data, if it is a separate file; else the image.
    pub fn companion(&self) -> &str {
        self.companion.as_deref().unwrap_or(&self.image)
    }

    /// The companion's name in a qcow2 header.
    pub(crate) fn reference(&self) -> &str {
        self.reference.as_deref().unwrap_or(self.companion())
    }
}

fn companion(format: Format, stem: &str) -> Option<String> {
    match format {
        Format::Qcow2External => Some(format!("{stem}{}", Format::Raw.suffix())),
        Format::Vmdk | Format::VmdkHosted => Some(format!("{stem}-flat.vmdk")),
        _ => None,
    }
}

const PROTOCOL: &str = "QEMU reads the part before a colon as a protocol";

/// Why a name must not appear in a descriptor or a qcow2 header: a reader would
/// take it for a path, a protocol or the end of a string.
fn fault(name: &str) -> Option<&'static str> {
    if name.is_empty() || name == "." || name == ".." {
        Some("it is not a file name")
    } else if name.len() > MAX_NAME_BYTES {
        Some("it is longer than 255 bytes")
    } else if name.contains(['/', '\\']) {
        Some("it is a path")
    } else if name.contains(':') {
        Some(PROTOCOL)
    } else if name.contains('"') || name.chars().any(char::is_control) {
        Some("it has a quotation mark or a control character")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_the_tree() {
        let names = Names::in_tree(Format::Vmdk, "vda").unwrap();
        assert_eq!((names.image(), names.companion()), ("vda.vmdk", "vda-flat.vmdk"));
        let names = Names::in_tree(Format::VmdkHosted, "vda").unwrap();
        assert_eq!((names.image(), names.companion()), ("vda.hosted.vmdk", "vda-flat.vmdk"));
        let names = Names::in_tree(Format::Qcow2External, "vda").unwrap();
        assert_eq!((names.image(), names.companion()), ("vda.external.qcow2", "vda.raw"));
    }

    #[test]
    fn companion_files_are_named_after_the_target_file() {
        let names = Names::beside(Format::Vmdk, "web 01.disk.vmdk").unwrap();
        assert_eq!(names.companion(), "web 01.disk-flat.vmdk");
        let names = Names::beside(Format::Qcow2External, "disk").unwrap();
        assert_eq!(names.companion(), "disk.raw");
        let names = Names::beside(Format::Qcow2External, "disk.raw").unwrap();
        assert_eq!(names.companion(), "disk.raw.data");
    }

    #[test]
    fn a_reference_is_a_path() {
        let names = Names::in_tree(Format::Qcow2External, "vda").unwrap();
        assert_eq!(names.reference(), "vda.raw");
        let path = "/mnt/live/trial:1/vda.raw";
        assert_eq!(names.clone().with_reference(path).unwrap().reference(), path);
        assert!(names.clone().with_reference("nbd:host/x").is_err());
        assert!(names.with_reference("a\nb").is_err());
    }

    #[test]
    fn names_that_would_lead_elsewhere_are_refused() {
        let long = "x".repeat(256);
        for name in ["", "..", "a/b", "a\\b", "json:{}", "a\"b", "a\nb", long.as_str()] {
            assert!(matches!(Names::beside(Format::Vmdk, name), Err(Error::FileName { .. })));
        }
    }
}
