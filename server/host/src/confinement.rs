//! Confines QEMU to the files that a machine needs.
//!
//! A guest that breaks out of QEMU has QEMU's rights: those of this user, who can read the
//! repository and the passphrase. So the thread that starts QEMU first restricts itself with
//! Landlock, permanently, and QEMU inherits that. The rules work on the files themselves, not on
//! their names; the kernel then also refuses to trace or signal processes outside.

use std::path::{Path, PathBuf};
use std::sync::Once;

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, NetPort, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetError, RulesetStatus, Scope, path_beneath_rules,
};
use serde::{Deserialize, Serialize};

/// The tested version (Linux 6.15); older kernels enforce the part that they know.
const TESTED_ABI: ABI = ABI::V7;
/// QEMU, its firmware and its libraries: readable and executable.
const PROGRAMS: [&str; 11] = [
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/nix/store",
    "/gnu/store",
    "/etc/ld.so.cache",
    "/etc/ld.so.preload",
    "/etc/alternatives",
];
/// What libraries and QEMU read about this host at their start.
const SYSTEM_FILES: [&str; 6] = [
    "/sys/devices/system",
    "/sys/kernel/mm/transparent_hugepage",
    "/proc/cpuinfo",
    "/proc/sys/crypto",
    "/dev/urandom",
    "/dev/random",
];
/// Read by QEMU's user network, if it leads anywhere.
const NETWORK_FILES: [&str; 4] =
    ["/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/run/systemd/resolve"];
const DEVICES: [&str; 2] = ["/dev/null", "/dev/kvm"];

/// The TCP connections that QEMU may make.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NetworkReach {
    /// Any.
    Any,
    /// It may accept connections at this port, and make none.
    Port(Option<u16>),
}

/// The resources of one machine's QEMU, in addition to its program and libraries.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reach {
    /// QEMU's own program, wherever it is installed.
    pub program: Option<PathBuf>,
    /// Other files that it may read.
    pub files: Vec<PathBuf>,
    /// Folders in which everything is allowed.
    pub folders: Vec<PathBuf>,
    /// The connections that it may make.
    pub network: NetworkReach,
}

/// Restricts the calling thread, and every process that it starts from now on. Warns once if the
/// kernel cannot.
pub fn confine_this_thread(reach: &Reach) {
    let enforced = enforce(reach);
    if let Err(error) = &enforced {
        tracing::debug!("Landlock: {error}");
    }
    if !enforced.is_ok_and(|is_enforced| is_enforced) {
        static WARNED: Once = Once::new();
        WARNED.call_once(|| {
            tracing::warn!(
                "QEMU is not confined: this kernel has no Landlock, or it is turned off. A machine \
                 that breaks out of QEMU could read the repository and the passphrase; boot only \
                 machines that you trust, or use a kernel with Landlock (lsm=landlock,...)"
            );
        });
    }
}

/// Warns if the kernel cannot confine QEMU. For a command whose QEMU a process without a terminal
/// starts.
pub fn warn_unless_confined() {
    // Only that thread is restricted, and it ends.
    let _ = std::thread::spawn(|| confine_this_thread(&nothing())).join();
}

/// Whether the kernel can confine QEMU.
pub(crate) fn can_confine() -> bool {
    let enforced = std::thread::spawn(|| enforce(&nothing()).is_ok_and(|is_enforced| is_enforced));
    enforced.join().unwrap_or(false)
}

fn nothing() -> Reach {
    let network = NetworkReach::Port(None);
    Reach { program: None, files: Vec::new(), folders: Vec::new(), network }
}

fn enforce(reach: &Reach) -> Result<bool, RulesetError> {
    let look = AccessFs::ReadFile | AccessFs::ReadDir;
    let run = look | AccessFs::Execute;
    let all = AccessFs::from_all(TESTED_ABI);
    let device = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::IoctlDev;
    let connects = matches!(reach.network, NetworkReach::Any);
    let network_files: &[&str] = if connects { &NETWORK_FILES } else { &[] };
    let mut ruleset = Ruleset::default().handle_access(all)?.scope(Scope::from_all(TESTED_ABI))?;
    if !connects {
        ruleset = ruleset.handle_access(AccessNet::from_all(TESTED_ABI))?;
    }
    let mut created = ruleset
        .create()?
        .add_rules(beneath(PROGRAMS, run))?
        .add_rules(beneath(reach.program.iter().filter_map(|p| p.canonicalize().ok()), run))?
        .add_rules(beneath(SYSTEM_FILES, look))?
        .add_rules(beneath(&reach.files, look))?
        .add_rules(beneath(network_files, look))?
        .add_rules(beneath(DEVICES, device))?
        .add_rules(beneath(&reach.folders, all))?;
    if let NetworkReach::Port(Some(port)) = reach.network {
        created = created.add_rule(NetPort::new(port, AccessNet::BindTcp))?;
    }
    Ok(created.restrict_self()?.ruleset != RulesetStatus::NotEnforced)
}

/// Rules for those of the paths that exist.
fn beneath<P: AsRef<Path>>(
    paths: impl IntoIterator<Item = P>,
    access: BitFlags<AccessFs>,
) -> impl Iterator<Item = Result<landlock::PathBeneath<landlock::PathFd>, RulesetError>> {
    path_beneath_rules(paths, access)
}
