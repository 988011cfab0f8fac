//! The UEFI firmware that is installed on a host, by the descriptors that QEMU's packages install
//! (QEMU's docs/interop/firmware.json).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use coldrise_block::Result;
use coldrise_host::{FileKind, Host};
use serde::Deserialize;

/// Where distributions and administrators describe firmware; a file in a later folder replaces one of the same name.
const FOLDERS: [&str; 2] = ["/usr/share/qemu/firmware", "/etc/qemu/firmware"];
/// Maximum length of a descriptor, in bytes.
const MAX_DESCRIPTOR_BYTES: u64 = 64 << 10;
const ARCHITECTURE: &str = "x86_64";

/// UEFI firmware in two flash files: code, and empty variables that each machine gets a copy of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uefi {
    /// The code.
    pub code: PathBuf,
    /// The variables of a new machine.
    pub variables: PathBuf,
    /// Their size, in bytes.
    pub variables_bytes: u64,
    features: Vec<String>,
    machines: Vec<String>,
}

/// A machine's requirements on its firmware.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UefiNeeds {
    /// The machine has processors other than x86_64: no firmware of this list fits.
    pub is_foreign: bool,
    /// The machine is a q35, else an i440fx.
    pub is_q35: bool,
    /// Secure Boot, with system management mode.
    pub secure_boot: bool,
    /// Secure Boot is on: the variables have Microsoft's keys.
    pub enrolled_keys: bool,
}

impl Uefi {
    /// Whether a machine with these needs can start with it.
    pub fn fits(&self, needs: UefiNeeds) -> bool {
        let machine = if needs.is_q35 { "pc-q35" } else { "pc-i440fx" };
        let has = |feature: &str| self.features.iter().any(|known| known == feature);
        !needs.is_foreign
            && self.machines.iter().any(|known| known.starts_with(machine))
            && has("secure-boot") == needs.secure_boot
            && has("requires-smm") == needs.secure_boot
            && has("enrolled-keys") == needs.enrolled_keys
    }
}

/// All installed UEFI firmware of a host for x86_64 whose files exist and are raw, in the order of preference.
///
/// # Errors
/// Errors of the connection and of the host's operating system.
pub fn installed(host: &Host) -> Result<Vec<Uefi>> {
    let mut descriptors = BTreeMap::new();
    for folder in FOLDERS {
        descriptors.extend(host.read_folder(Path::new(folder), MAX_DESCRIPTOR_BYTES)?);
    }
    let mut firmware = Vec::new();
    for uefi in descriptors.into_values().filter_map(|text| parse(&text)) {
        if let [Some(code), Some(variables)] = host.look([&uefi.code, &uefi.variables])? {
            let variables_bytes = variables.size_bytes;
            if [code.kind, variables.kind] == [FileKind::File; 2] {
                firmware.push(Uefi { variables_bytes, ..uefi });
            }
        }
    }
    Ok(firmware)
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Descriptor {
    interface_types: Vec<String>,
    mapping: Mapping,
    targets: Vec<Target>,
    features: Vec<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Mapping {
    device: String,
    executable: FlashFile,
    nvram_template: FlashFile,
}

#[derive(Deserialize)]
struct FlashFile {
    filename: PathBuf,
    format: String,
}

#[derive(Deserialize)]
struct Target {
    architecture: String,
    machines: Vec<String>,
}

/// `None` for firmware of another kind: a BIOS, without variables, for other processors, in qcow2 files.
fn parse(text: &[u8]) -> Option<Uefi> {
    let described: Descriptor = serde_json::from_slice(text).ok()?;
    let Mapping { device, executable, nvram_template } = described.mapping;
    let is_uefi = described.interface_types.iter().any(|kind| kind == "uefi")
        && device == "flash"
        && executable.format == "raw"
        && nvram_template.format == "raw";
    let ours = described.targets.into_iter().filter(|t| t.architecture == ARCHITECTURE);
    let machines: Vec<String> = ours.flat_map(|target| target.machines).collect();
    (is_uefi && !machines.is_empty()).then_some(Uefi {
        code: executable.filename,
        variables: nvram_template.filename,
        variables_bytes: 0,
        features: described.features,
        machines,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn descriptor(machine: &str, features: &str, format: &str) -> String {
        format!(
            r#"{{ "description": "x", "interface-types": ["uefi"], "mapping": {{ "device": "flash",
               "executable": {{ "filename": "/code", "format": "{format}" }},
               "nvram-template": {{ "filename": "/vars", "format": "{format}" }} }},
               "targets": [{{ "architecture": "x86_64", "machines": ["{machine}"] }}],
               "features": [{features}], "tags": [] }}"#
        )
    }

    #[test]
    fn firmware_fits_its_machines_and_no_others() {
        let plain = parse(descriptor("pc-i440fx-*", "", "raw").as_bytes()).unwrap();
        assert!(plain.fits(UefiNeeds::default()));
        assert!(!plain.fits(UefiNeeds { is_q35: true, ..UefiNeeds::default() }));
        assert!(!plain.fits(UefiNeeds { is_foreign: true, ..UefiNeeds::default() }));
        assert!(!plain.fits(UefiNeeds { secure_boot: true, ..UefiNeeds::default() }));
        let features = r#""secure-boot", "requires-smm", "enrolled-keys""#;
        let secure = parse(descriptor("pc-q35-*", features, "raw").as_bytes()).unwrap();
        let needs =
            UefiNeeds { is_q35: true, secure_boot: true, enrolled_keys: true, is_foreign: false };
        assert!(secure.fits(needs));
        assert!(!secure.fits(UefiNeeds { enrolled_keys: false, ..needs }));
        assert!(!secure.fits(UefiNeeds { is_q35: true, ..UefiNeeds::default() }));
    }

    #[test]
    fn firmware_of_other_kinds_is_skipped() {
        assert_eq!(parse(descriptor("pc-q35-*", "", "qcow2").as_bytes()), None);
        let arm = descriptor("virt-*", "", "raw").replace("x86_64", "aarch64");
        assert_eq!(parse(arm.as_bytes()), None);
        assert_eq!(parse(b"{}"), None);
    }
}
