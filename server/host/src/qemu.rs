//! What a host has for machines in QEMU.

use std::path::{Path, PathBuf};

use coldrise_block::read_small_file;
use serde::{Deserialize, Serialize};

use crate::confinement::can_confine;
use crate::kvm::kvm_works;

/// QEMU's program.
pub const QEMU: &str = "qemu-system-x86_64";
const SWTPM: &str = "swtpm";
const MEMORY: &str = "/proc/meminfo";
const MAX_MEMORY_BYTES: u64 = 1 << 20;

/// What a host has for machines in QEMU.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QemuFacts {
    /// Where QEMU is installed.
    pub program: Option<PathBuf>,
    /// Why guests do not run under KVM; `None` if they do.
    pub without_kvm: Option<String>,
    /// Memory of the machine that can be allocated without swapping, in bytes.
    pub available_bytes: Option<u64>,
    /// Number of processors.
    pub processors: usize,
    /// Whether the kernel can confine QEMU.
    pub confines: bool,
    /// Whether there is a program for TPMs.
    pub has_swtpm: bool,
}

impl QemuFacts {
    /// Those of this host.
    pub(crate) fn here() -> QemuFacts {
        QemuFacts {
            program: installed_program(QEMU),
            without_kvm: kvm_works().err().map(str::to_owned),
            available_bytes: available_bytes(),
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            confines: can_confine(),
            has_swtpm: installed_program(SWTPM).is_some(),
        }
    }
}

/// Where a program is installed.
pub fn installed_program(name: &str) -> Option<PathBuf> {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&folders).map(|folder| folder.join(name)).find(|path| path.is_file())
}

fn available_bytes() -> Option<u64> {
    let text = read_small_file(Path::new(MEMORY), MAX_MEMORY_BYTES).ok()?;
    let text = String::from_utf8_lossy(&text);
    let field = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = field.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}
