//! Parses the user's `DISK=[FORMAT:]SOURCE`.

use std::fmt;
use std::path::{Path, PathBuf};

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_store::{DiskName, PointName};

/// Longest accepted `DISK=[FORMAT:]SOURCE`, in bytes.
const MAX_SPEC_BYTES: usize = 4096;

const NBD_SCHEMES: [&str; 6] = ["nbd", "nbds", "nbd+unix", "nbds+unix", "nbd+vsock", "nbds+vsock"];

/// A format of disk images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageFormat {
    /// The disk's bytes, unchanged.
    Raw,
    /// QEMU's qcow2.
    Qcow2,
    /// VMware's VMDK.
    Vmdk,
    /// Microsoft's VHD (Virtual PC), fixed or dynamic.
    Vhd,
    /// Microsoft's VHDX.
    Vhdx,
}

impl ImageFormat {
    /// All formats.
    pub const ALL: [ImageFormat; 5] = [
        ImageFormat::Raw,
        ImageFormat::Qcow2,
        ImageFormat::Vmdk,
        ImageFormat::Vhd,
        ImageFormat::Vhdx,
    ];

    /// The format's word on the command line.
    pub fn word(self) -> &'static str {
        match self {
            ImageFormat::Raw => "raw",
            ImageFormat::Qcow2 => "qcow2",
            ImageFormat::Vmdk => "vmdk",
            ImageFormat::Vhd => "vhd",
            ImageFormat::Vhdx => "vhdx",
        }
    }

    /// The format for a word of the command line.
    pub fn from_word(word: &str) -> Option<ImageFormat> {
        ImageFormat::ALL.into_iter().find(|format| format.word() == word)
    }

    /// The format for a file's extension. The content is never examined: a guest may
    /// write bytes into a raw disk that look like another format.
    pub fn from_extension(path: &Path) -> Option<ImageFormat> {
        let extension = path.extension()?.to_str()?.to_ascii_lowercase();
        match extension.as_str() {
            "raw" | "img" => Some(ImageFormat::Raw),
            "qcow2" => Some(ImageFormat::Qcow2),
            "vmdk" => Some(ImageFormat::Vmdk),
            "vhd" | "vpc" => Some(ImageFormat::Vhd),
            "vhdx" => Some(ImageFormat::Vhdx),
            _ => None,
        }
    }

    /// The name of QEMU's driver.
    pub(crate) fn qemu_driver(self) -> &'static str {
        match self {
            ImageFormat::Vhd => "vpc",
            other => other.word(),
        }
    }
}

impl fmt::Display for ImageFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// The location of a disk's content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// An image file or a block device.
    Image {
        /// The path, as given.
        path: PathBuf,
        /// The format, from the prefix or the extension.
        format: ImageFormat,
    },
    /// A VMDK that is a member of a tar archive, read in place.
    Member {
        /// The archive.
        archive: PathBuf,
        /// The member's name.
        name: String,
        /// Its first byte in the archive; a multiple of 512.
        offset_bytes: u64,
        /// Its length.
        length_bytes: u64,
    },
    /// An export of an NBD server.
    Nbd {
        /// The URI, as given.
        uri: String,
    },
    /// The content of a machine, offered for this backup.
    Live {
        /// The URI of its NBD export.
        uri: String,
        /// The name that the user gave, for messages and the point's origin.
        name: String,
        /// The dirty bitmap that limits what is read.
        bitmap: Option<LiveBitmap>,
        /// Whether the export reports zeroes and holes as they are now, and not as they were at its instant.
        has_late_status: bool,
    },
}

/// A dirty bitmap of a running machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveBitmap {
    /// Its name in the export.
    pub name: String,
    /// The backup since which it has all changes.
    pub since: PointName,
    /// Whether the source has what the bitmap does not mark, too. A copy that QEMU made (push) has zeroes there.
    pub is_whole_disk: bool,
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Location::Image { path, .. } => write!(f, "{}", path.display()),
            Location::Member { archive, name, .. } => {
                write!(f, "{}: {}", archive.display(), name.escape_debug())
            }
            Location::Nbd { uri } => f.write_str(uri),
            Location::Live { name, .. } => f.write_str(name),
        }
    }
}

/// A disk to back up and the location of its content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceSpec {
    /// The disk's name in the repository.
    pub disk: DiskName,
    /// The location of its content.
    pub location: Location,
}

impl SourceSpec {
    /// Parses `DISK=[FORMAT:]SOURCE`. SOURCE is the path of an image file or an NBD
    /// URI. FORMAT is raw, qcow2, vmdk, vhd or vhdx. Without FORMAT, the file's
    /// extension decides (.raw .img .qcow2 .vmdk .vhd .vpc .vhdx).
    ///
    /// Fails with `InvalidInput`; the message says what is accepted.
    pub fn parse(text: &str) -> Result<SourceSpec> {
        if text.len() > MAX_SPEC_BYTES {
            return Err(invalid(format!("a source longer than {MAX_SPEC_BYTES} bytes")));
        }
        let Some((disk, source)) = text.split_once('=') else {
            return Err(invalid(format!(
                "'{text}' names no disk: write DISK=[FORMAT:]SOURCE, such as vda=disk.qcow2. Only an \
                 .ova or .ovf file, which is a whole machine, has no DISK="
            )));
        };
        let disk = DiskName::parse(disk)?;
        let location = Location::parse(source).map_err(|error| error.context(&disk))?;
        Ok(SourceSpec { disk, location })
    }
}

impl fmt::Display for SourceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.disk, self.location)
    }
}

fn invalid(text: String) -> Error {
    Error::new(ErrorKind::InvalidInput, text)
}

/// True for text that starts like an NBD URI.
pub(crate) fn is_nbd_uri(text: &str) -> bool {
    text.split_once("://").is_some_and(|(scheme, _)| NBD_SCHEMES.contains(&scheme))
}

/// True for the name of a whole machine's file: .ova or .ovf.
pub(crate) fn is_appliance(path: &Path) -> bool {
    let has = |extension: &str| path.extension().is_some_and(|e| e.eq_ignore_ascii_case(extension));
    has("ova") || has("ovf")
}

impl Location {
    /// Parses `[FORMAT:]SOURCE`, as in [`SourceSpec::parse`].
    pub fn parse(text: &str) -> Result<Location> {
        if text.contains('\0') {
            return Err(invalid("a source contains a NUL byte".to_string()));
        }
        if is_nbd_uri(text) {
            return Ok(Location::Nbd { uri: text.to_string() });
        }
        let prefix = text
            .split_once(':')
            .and_then(|(word, rest)| ImageFormat::from_word(word).map(|format| (format, rest)));
        let (format, path) = match prefix {
            Some((format, rest)) if is_nbd_uri(rest) => {
                return Err(invalid(format!(
                    "'{text}': an NBD server already serves the disk's own content: leave out \
                     '{format}:'"
                )));
            }
            Some((format, rest)) => (Some(format), rest),
            None => (None, text),
        };
        if path.is_empty() {
            return Err(invalid("the source is empty".to_string()));
        }
        if format.is_none() && path.contains("://") {
            return Err(invalid(format!(
                "'{path}': only NBD URIs can be read: {}",
                NBD_SCHEMES.map(|scheme| format!("{scheme}://")).join(" ")
            )));
        }
        if let (None, Some((word, _))) = (format, path.split_once(':')) {
            // A path may hold a colon: with a slash before it, it is one for sure.
            let is_word = !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_alphanumeric());
            if is_word && !Path::new(path).exists() {
                return Err(invalid(format!(
                    "'{word}:' is not an image format: use raw:, qcow2:, vmdk:, vhd: or vhdx:. If it \
                     begins a file's name, write ./{path}"
                )));
            }
        }
        let path = PathBuf::from(path);
        if format.is_none() && is_appliance(&path) {
            return Err(invalid(format!(
                "'{}' is a whole machine: name it without a disk (backup MACHINE {0}), or unpack it (tar xf) and \
                 name its VMDK",
                path.display()
            )));
        }
        let format = format.or_else(|| ImageFormat::from_extension(&path)).ok_or_else(|| {
            invalid(format!(
                "'{}': the format cannot be determined from the file's name: put raw:, qcow2:, vmdk:, vhd: \
                 or vhdx: in front",
                path.display()
            ))
        })?;
        Ok(Location::Image { path, format })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(text: &str) -> (String, ImageFormat) {
        match SourceSpec::parse(text).unwrap().location {
            Location::Image { path, format } => (path.to_str().unwrap().to_string(), format),
            _ => panic!("{text} is not an image"),
        }
    }

    #[test]
    fn the_prefix_wins_over_the_extension() {
        assert_eq!(image("vda=/a/b.qcow2"), ("/a/b.qcow2".into(), ImageFormat::Qcow2));
        assert_eq!(image("vda=raw:/a/b.qcow2"), ("/a/b.qcow2".into(), ImageFormat::Raw));
        assert_eq!(image("vda=B.IMG"), ("B.IMG".into(), ImageFormat::Raw));
        assert_eq!(image("vda=x.vpc"), ("x.vpc".into(), ImageFormat::Vhd));
        assert_eq!(image("vda=x.vhd"), ("x.vhd".into(), ImageFormat::Vhd));
        assert_eq!(image("vda=x.vhdx"), ("x.vhdx".into(), ImageFormat::Vhdx));
        assert_eq!(image("vda=x.vmdk"), ("x.vmdk".into(), ImageFormat::Vmdk));
        assert_eq!(image("vda=vhdx:/dev/sda"), ("/dev/sda".into(), ImageFormat::Vhdx));
        // '=' and ':' are ordinary characters of a path.
        assert_eq!(image("vda=/a=b:c.raw"), ("/a=b:c.raw".into(), ImageFormat::Raw));
        assert_eq!(image("vda=raw:raw:x"), ("raw:x".into(), ImageFormat::Raw));
    }

    #[test]
    fn nbd_uris_are_taken_as_they_are() {
        for uri in [
            "nbd://host/disk",
            "nbd+unix:///live/t/vda?socket=/run/x=y",
            "nbds://host:10809/a%20b",
            "nbds+unix:///?socket=x",
        ] {
            let spec = SourceSpec::parse(&format!("vda={uri}")).unwrap();
            assert_eq!(spec.location, Location::Nbd { uri: uri.to_string() });
        }
    }

    #[test]
    fn invalid_disk_sources_are_refused_with_advice() {
        for (text, advice) in [
            ("disk.raw", "DISK="),
            ("vda=", "empty"),
            ("vda=raw:", "empty"),
            ("vda=/a/disk", "raw:, qcow2:"),
            ("vda=/a/disk.iso", "raw:, qcow2:"),
            ("vda=foo:/a/disk", "'foo:' is not an image format"),
            ("vda=vdi:/a/disk.raw", "'vdi:' is not an image format"),
            ("vda=./foo:disk", "raw:, qcow2:"),
            ("vda=http://host/disk.raw", "NBD"),
            ("vda=qcow2:nbd://host", "leave out"),
            ("vda=a\0b.raw", "NUL"),
        ] {
            let error = SourceSpec::parse(text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{text}");
            assert!(error.full_message().contains(advice), "{text}: {error}");
        }
        assert_eq!(SourceSpec::parse("../x=a.raw").unwrap_err().kind(), ErrorKind::InvalidInput);
    }
}
