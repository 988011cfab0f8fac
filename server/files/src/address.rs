//! `MACHINE/POINT[/DISK[,DISK...]]:[FILE SYSTEM]/PATH`, and the same of `live/SESSION@TIME`.

use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_files_protocol::MAX_PATH_BYTES;
use coldrise_store::{Address, DiskName, MachineName};

use super::names::shown;

/// A path in a restore point, or in a session at a time mark.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilesAddress {
    /// The point or the time mark, without a disk.
    pub whole: Address,
    /// The only disks to look at, sorted; none stands for all.
    pub disks: Vec<DiskName>,
    /// The file system's name; `None` for the root of the system.
    pub system: Option<String>,
    /// The path, which begins with `/`; `None` if the address ends before it.
    pub path: Option<Vec<u8>>,
}

impl FilesAddress {
    /// Parses an address.
    ///
    /// # Errors
    /// `InvalidInput`; the message says what is allowed.
    pub fn parse(text: &OsStr) -> Result<FilesAddress> {
        let bytes = text.as_bytes();
        let refuse = || {
            let text = format!(
                "{}: use MACHINE/POINT:/PATH, or MACHINE/POINT:vda1/PATH for another file system than \
                 the system's, or MACHINE/POINT: for the list of file systems",
                shown(bytes)
            );
            Error::new(ErrorKind::InvalidInput, text)
        };
        let (point, inside) = split(bytes, b':').ok_or_else(refuse)?;
        let point = std::str::from_utf8(point).map_err(|_| refuse())?;
        let (whole, named) = match point.match_indices('/').nth(1) {
            Some((place, _)) => (point.get(..place), point.get(place + 1..)),
            None => (Some(point), None),
        };
        let whole = Address::parse(whole.unwrap_or_default())?;
        if let Address::Live { session, .. } = &whole {
            let text = format!(
                "{point}: files are read from restore points; seal the session first, or name a time \
                 of it such as live/{session}@-90s"
            );
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        let disks = named.map_or(Ok(Vec::new()), disks)?;
        let (system, path) = match inside.iter().position(|byte| *byte == b'/') {
            Some(end) => inside.split_at(end),
            None => (inside, [].as_slice()),
        };
        if path.len() > MAX_PATH_BYTES || path.contains(&0) {
            return Err(refuse());
        }
        let system = std::str::from_utf8(system).map_err(|_| refuse())?;
        Ok(FilesAddress {
            whole,
            disks,
            system: (!system.is_empty()).then(|| system.to_owned()),
            path: (!path.is_empty()).then(|| path.to_vec()),
        })
    }

    /// MACHINE/POINT or live/SESSION@TIME.
    pub fn point(&self) -> String {
        self.whole.to_string()
    }

    /// The last name of the path, if it has one.
    pub fn last_name(&self) -> Option<&[u8]> {
        let path = self.path.as_deref()?;
        let name = path.split(|byte| *byte == b'/').rfind(|name| !name.is_empty())?;
        (name != b"." && name != b"..").then_some(name)
    }
}

/// `MACHINE:[FILE SYSTEM]/PATH`: a path in all points of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistoryAddress {
    /// The machine.
    pub machine: MachineName,
    /// The path. Its point means nothing.
    pub inside: FilesAddress,
}

impl HistoryAddress {
    /// Parses an address.
    ///
    /// # Errors
    /// `InvalidInput`; the message says what is allowed.
    pub fn parse(text: &OsStr) -> Result<HistoryAddress> {
        let bytes = text.as_bytes();
        let refuse = || {
            let text = format!(
                "{}: use MACHINE:/PATH, or MACHINE:vda1/PATH for another file system than the system's",
                shown(bytes)
            );
            Error::new(ErrorKind::InvalidInput, text)
        };
        let (machine, inside) = split(bytes, b':').ok_or_else(refuse)?;
        let machine = std::str::from_utf8(machine).ok().and_then(|m| m.parse::<MachineName>().ok());
        let machine = machine.ok_or_else(refuse)?;
        let mut whole = format!("{machine}/latest:").into_bytes();
        whole.extend_from_slice(inside);
        let inside = FilesAddress::parse(OsStr::from_bytes(&whole)).map_err(|_| refuse())?;
        match inside.path {
            Some(_) => Ok(HistoryAddress { machine, inside }),
            None => Err(refuse()),
        }
    }
}

impl fmt::Display for HistoryAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let system = self.inside.system.as_deref().unwrap_or_default();
        let path = shown(self.inside.path.as_deref().unwrap_or_default());
        write!(f, "{}:{}{path}", self.machine, shown(system.as_bytes()))
    }
}

impl fmt::Display for FilesAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let disks = point_with_disks(&self.point(), &self.disks);
        let system = self.system.as_deref().unwrap_or_default();
        let path = shown(self.path.as_deref().unwrap_or_default());
        write!(f, "{disks}:{}{path}", shown(system.as_bytes()))
    }
}

/// `MACHINE/POINT[/DISK[,DISK...]]`.
pub fn point_with_disks(point: &str, disks: &[DiskName]) -> String {
    let names: Vec<&str> = disks.iter().map(DiskName::as_str).collect();
    match names.is_empty() {
        true => point.to_owned(),
        false => format!("{point}/{}", names.join(",")),
    }
}

/// The disks of `vda,vdb`.
fn disks(list: &str) -> Result<Vec<DiskName>> {
    let parsed: Result<Vec<DiskName>> = list.split(',').map(DiskName::parse).collect();
    let mut disks = parsed
        .map_err(|error| error.advise("several disks are named as in MACHINE/POINT/vda,vdb:"))?;
    disks.sort();
    let same = disks.windows(2).find_map(|two| (two.first() == two.last()).then(|| two.first()));
    match same.flatten() {
        Some(disk) => {
            Err(Error::new(ErrorKind::InvalidInput, format!("{list} names disk {disk} twice")))
        }
        None => Ok(disks),
    }
}

fn split(bytes: &[u8], at: u8) -> Option<(&[u8], &[u8])> {
    let place = bytes.iter().position(|byte| *byte == at)?;
    Some((bytes.get(..place)?, bytes.get(place + 1..)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<FilesAddress> {
        FilesAddress::parse(OsStr::new(text))
    }

    #[test]
    fn an_address_has_a_point_a_file_system_and_a_path() {
        let whole = parse("web01/latest~1/vda:vda1/etc/a:b").unwrap();
        assert_eq!(whole.system.as_deref(), Some("vda1"));
        assert_eq!(whole.path.as_deref(), Some(b"/etc/a:b".as_slice()));
        assert_eq!(whole.to_string(), "web01/latest~1/vda:vda1/etc/a:b");
        let several = parse("web01/latest/vdb,vda:/etc").unwrap();
        assert_eq!(several.to_string(), "web01/latest/vda,vdb:/etc");
        let list = parse("web01/latest:").unwrap();
        assert_eq!((list.system, list.path), (None, None));
        let marked = parse("live/rescue@-90s/vda:/etc").unwrap();
        assert_eq!(marked.to_string(), "live/rescue@-90s/vda:/etc");
        let history = HistoryAddress::parse(OsStr::new("web01:vda1/etc/a:b")).unwrap();
        assert_eq!(history.to_string(), "web01:vda1/etc/a:b");
        for refused in ["web01", "web01:", "web01/latest:/etc", ":/etc"] {
            assert!(HistoryAddress::parse(OsStr::new(refused)).is_err(), "{refused}");
        }
        assert_eq!(parse("web01/latest:/").unwrap().path.as_deref(), Some(b"/".as_slice()));
        for refused in [
            "web01/latest",
            "web01:/etc",
            "live/rescue:/etc",
            ":/etc",
            "web01/latest/a/b:/",
            "web01/latest/:/",
            "web01/latest/a,:/",
            "web01/latest/a,b,a:/",
            "live/rescue/a,b:/",
        ] {
            assert_eq!(parse(refused).unwrap_err().kind(), ErrorKind::InvalidInput, "{refused}");
        }
    }
}
