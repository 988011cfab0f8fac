//! Keeps a child away from everything that it was not started for.
//!
//! A thread that is about to start a child restricts itself, for good; what it starts
//! inherits that. Nothing of it needs root, `unsafe`, or a program of our own between us
//! and the child. The three parts back each other up:
//!
//! - Landlock: which files can be opened. It works on the files themselves, not on their
//!   names, so that links and renames change nothing.
//! - seccomp: no sockets, no change to any file, no look into other processes (see
//!   [`super::calls`]).
//! - Where we are root, the child is root without its powers, except the one to read.

use std::os::fd::OwnedFd;
use std::sync::Once;

use coldrise_block::{Context, Error, ErrorKind, Result};
use landlock::{
    path_beneath_rules, Access, AccessFs, AccessNet, BitFlags, PathBeneath, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetError, RulesetStatus, Scope, ABI,
};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::thread::CapabilitySet;

use super::{calls, ImageFile};

/// What this was tested with (Linux 6.15); older kernels enforce what they know of it.
const TESTED_ABI: ABI = ABI::V7;
/// Programs and libraries, to be read and run.
const PROGRAMS: [&str; 7] =
    ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache"];
/// What the C library asks on its way.
const SYSTEM_FILES: [&str; 2] = ["/sys/devices/system/cpu", "/dev/urandom"];
const NULL_DEVICE: [&str; 1] = ["/dev/null"];

/// How far this machine lets foreign images be read in a confined process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Confinement {
    /// Only the named files can be opened (Landlock).
    pub limits_files: bool,
    /// Sockets, changes to files and other processes are out of reach (seccomp).
    pub limits_calls: bool,
}

/// Restricts the calling thread, and whatever it starts from now on, to reading `files`
/// and the system's programs.
///
/// Where the kernel lacks a part, that part is left out, and a warning says so once.
/// Fails where one of `files` cannot be opened.
pub(super) fn confine_this_thread(files: &[ImageFile]) -> Result<Confinement> {
    let rules = file_rules(files)?;
    drop_powers();
    let limits_files = match rules.enforce() {
        Ok(is_enforced) => is_enforced,
        Err(error) => {
            tracing::debug!("Landlock: {error}");
            false
        }
    };
    // Last: the filter refuses some of what the steps above need.
    let limits_calls = match calls::filter()
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
    /// What is missing of the full confinement, in words; `None`: nothing.
    pub fn missing(&self) -> Option<&'static str> {
        match (self.limits_files, self.limits_calls) {
            (true, true) => None,
            (false, true) => Some("this kernel has no Landlock, or it is turned off"),
            (true, false) => Some("this kernel refuses seccomp filters"),
            (false, false) => Some("this kernel has neither Landlock nor seccomp filters"),
        }
    }
}

/// Finds out how far children are confined here, by confining a thread that then ends.
pub fn import_confinement() -> Result<Confinement> {
    std::thread::spawn(|| confine_this_thread(&[]))
        .join()
        .map_err(|_| Error::new(ErrorKind::Internal, "a thread that confined itself ended badly"))?
}

/// Files that are open to be named in rules.
struct FileRules {
    rules: Vec<PathBeneath<OwnedFd>>,
}

fn file_rules(files: &[ImageFile]) -> Result<FileRules> {
    let mut rules = Vec::with_capacity(files.len());
    for ImageFile { path, may_be_link } in files {
        let what = || format!("opening {}", path.display());
        let follow = if *may_be_link { OFlags::empty() } else { OFlags::NOFOLLOW };
        let opened = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC | follow, Mode::empty())
            .map_err(std::io::Error::from)
            .context(what)?;
        let status = rustix::fs::fstat(&opened).map_err(std::io::Error::from).context(what)?;
        let mut access: BitFlags<AccessFs> = AccessFs::ReadFile.into();
        if FileType::from_raw_mode(status.st_mode) == FileType::BlockDevice {
            // To ask for its size.
            access |= AccessFs::IoctlDev;
        }
        rules.push(PathBeneath::new(opened, access));
    }
    Ok(FileRules { rules })
}

impl FileRules {
    /// True when the kernel enforces them from now on.
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

/// What root starts has root's powers but for this; an image that only its owner may read
/// can be read all the same. Others have no powers to pass on: they are refused here.
fn drop_powers() {
    for power in CapabilitySet::all().iter() {
        if power != CapabilitySet::DAC_READ_SEARCH {
            let _ = rustix::thread::remove_capability_from_bounding_set(power);
        }
    }
    let _ = rustix::thread::clear_ambient_capability_set();
}

#[cfg(test)]
#[path = "confinement_tests.rs"]
mod tests;
