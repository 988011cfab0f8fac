//! Confines a child to the resources that it needs.
//!
//! A thread that is about to start a child restricts itself, permanently; the child
//! inherits the restrictions. This needs no root, no `unsafe`, and no extra program
//! between us and the child. The three parts back each other up:
//!
//! - Landlock: which files can be opened. It works on the files themselves, not on their
//!   names, so links and renames do not matter.
//! - seccomp: no sockets, no change to any file, no access to other processes (see
//!   [`crate::calls`]).
//! - If we are root, the child is root without capabilities, except the one to read.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Once;

use coldrise_block::{Context, Error, ErrorKind, Result};
use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, PathBeneath, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetError, RulesetStatus, Scope, path_beneath_rules,
};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::thread::CapabilitySet;
use serde::{Deserialize, Serialize};

use crate::calls;
use crate::limits::Limits;

/// The tested version (Linux 6.15); older kernels enforce the part that they know.
const TESTED_ABI: ABI = ABI::V7;
/// Programs and libraries: readable and executable.
const PROGRAMS: [&str; 7] =
    ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache"];
/// Files that the C library reads at start.
const SYSTEM_FILES: [&str; 2] = ["/sys/devices/system/cpu", "/dev/urandom"];
const NULL_DEVICE: [&str; 1] = ["/dev/null"];

/// What a program may use that reads a foreign image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bounds {
    /// The files that it may open beside the system's programs and libraries.
    pub files: Vec<AllowedFile>,
    /// Memory, processor time and the like.
    pub limits: Limits,
}

impl Bounds {
    /// Restricts the calling thread, and every program that it starts from now on, for good.
    pub(crate) fn confine_this_thread(&self) -> Result<()> {
        confine_this_thread(&self.files).map(drop)
    }
}

/// A file that a program may open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AllowedFile {
    /// Its path, absolute.
    pub path: PathBuf,
    /// Whether the last component of its path may be a link: in the user's path it may. In
    /// a name from an image it may not, not even right after the check.
    pub may_be_link: bool,
    /// Whether the program may also write it.
    pub is_writable: bool,
}

/// How well this machine can confine the process that reads foreign images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Confinement {
    /// Only the named files can be opened (Landlock).
    pub limits_files: bool,
    /// Sockets, changes to files and other processes are out of reach (seccomp).
    pub limits_calls: bool,
}

/// Restricts the calling thread, and every process that it starts from now on, to reading
/// `files` and the system's programs, and to writing the writable ones of `files`.
///
/// If the kernel lacks a part, that part is omitted with one warning. Fails if one of
/// `files` cannot be opened.
fn confine_this_thread(files: &[AllowedFile]) -> Result<Confinement> {
    let rules = file_rules(files)?;
    let writes = files.iter().any(|file| file.is_writable);
    drop_powers(writes);
    let limits_files = match rules.enforce() {
        Ok(is_enforced) => is_enforced,
        Err(error) => {
            tracing::debug!("Landlock: {error}");
            false
        }
    };
    // Last: the filter refuses some calls that the steps above need.
    let limits_calls = match calls::filter(writes)
        .and_then(|filter| seccompiler::apply_filter(&filter).map_err(|error| error.to_string()))
    {
        Ok(()) => true,
        Err(error) => {
            tracing::debug!("seccomp: {error}");
            false
        }
    };
    let confinement = Confinement { limits_files, limits_calls };
    static WARNED: Once = Once::new();
    if let Some(missing) = confinement.missing() {
        WARNED.call_once(|| {
            tracing::warn!(
                "images are read by QEMU in a process that is not fully confined: {missing}"
            );
        });
    }
    Ok(confinement)
}

impl Confinement {
    /// Describes the missing part of the confinement; `None` if it is full.
    pub fn missing(&self) -> Option<&'static str> {
        match (self.limits_files, self.limits_calls) {
            (true, true) => None,
            (false, true) => Some("this kernel has no Landlock, or it is turned off"),
            (true, false) => Some("this kernel refuses seccomp filters"),
            (false, false) => Some("this kernel has neither Landlock nor seccomp filters"),
        }
    }
}

/// Finds out how well children are confined here, by confining a thread that then ends.
pub fn import_confinement() -> Result<Confinement> {
    std::thread::spawn(|| confine_this_thread(&[])).join().map_err(|_| {
        Error::new(ErrorKind::Internal, "a thread panicked while it confined itself")
    })?
}

/// Files that were opened to be named in rules.
struct FileRules {
    rules: Vec<PathBeneath<OwnedFd>>,
}

fn file_rules(files: &[AllowedFile]) -> Result<FileRules> {
    let mut rules = Vec::with_capacity(files.len());
    for AllowedFile { path, may_be_link, is_writable } in files {
        let what = || format!("opening {}", path.display());
        let follow = if *may_be_link { OFlags::empty() } else { OFlags::NOFOLLOW };
        let opened = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC | follow, Mode::empty())
            .map_err(std::io::Error::from)
            .context(what)?;
        let status = rustix::fs::fstat(&opened).map_err(std::io::Error::from).context(what)?;
        let mut access: BitFlags<AccessFs> = AccessFs::ReadFile.into();
        if FileType::from_raw_mode(status.st_mode) == FileType::BlockDevice {
            // For asking the size of a block device.
            access |= AccessFs::IoctlDev;
        }
        if *is_writable {
            access |= AccessFs::WriteFile | AccessFs::Truncate;
        }
        rules.push(PathBeneath::new(opened, access));
    }
    Ok(FileRules { rules })
}

impl FileRules {
    /// True if the kernel enforces the rules from now on.
    fn enforce(self) -> std::result::Result<bool, RulesetError> {
        let run = AccessFs::ReadFile | AccessFs::ReadDir | AccessFs::Execute;
        let look = AccessFs::ReadFile | AccessFs::ReadDir;
        let restricted = Ruleset::default()
            .handle_access(AccessFs::from_all(TESTED_ABI))?
            .handle_access(AccessNet::from_all(TESTED_ABI))?
            .scope(Scope::from_all(TESTED_ABI))?
            .create()?
            .add_rules(path_beneath_rules(PROGRAMS, run))?
            .add_rules(path_beneath_rules(SYSTEM_FILES, look))?
            .add_rules(path_beneath_rules(NULL_DEVICE, AccessFs::ReadFile | AccessFs::WriteFile))?
            .add_rules(self.rules.into_iter().map(Ok::<_, RulesetError>))?
            .restrict_self()?;
        Ok(restricted.ruleset != RulesetStatus::NotEnforced)
    }
}

/// A child of root keeps only the capability to read, so that it can read an image that
/// only its owner may read, or also the one to write. Other users have no capabilities to
/// pass on: the call fails for them.
fn drop_powers(writes: bool) {
    let kept = match writes {
        true => CapabilitySet::DAC_READ_SEARCH | CapabilitySet::DAC_OVERRIDE,
        false => CapabilitySet::DAC_READ_SEARCH,
    };
    for power in CapabilitySet::all().iter() {
        if !kept.contains(power) {
            let _ = rustix::thread::remove_capability_from_bounding_set(power);
        }
    }
    let _ = rustix::thread::clear_ambient_capability_set();
}

#[cfg(test)]
#[path = "image_confinement_tests.rs"]
mod tests;
