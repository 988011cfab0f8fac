//! Where libvirt keeps a domain's parts beside its disks.

use std::path::{Path, PathBuf};

use coldrise_block::{Error, ErrorKind, Result};
use roxmltree::{Document, Node, ParsingOptions};

use super::domain_xml::{child, tag};

/// Maximum number of elements and attributes.
const MAX_NODES: u32 = 100_000;
/// libvirt's folders of firmware variables and of TPMs, for the system and below a user's configuration.
const VARIABLES: &str = "/var/lib/libvirt/qemu/nvram";
const VARIABLES_OF_USER: &str = "libvirt/qemu/nvram";
const TPMS: &str = "/var/lib/libvirt/swtpm";
const TPMS_OF_USER: &str = "libvirt/qemu/swtpm";
/// The state of a TPM 2.0 in its folder. swtpm replaces it by a rename, so each copy is whole.
const PERMALL: &str = "tpm2-00.permall";

/// The files of a domain's parts beside its disks.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct PartFiles {
    /// Its firmware variables.
    pub variables: Option<PathBuf>,
    /// These are a qcow2 image, else raw.
    pub is_qcow2: bool,
    /// The state of its TPM.
    pub tpm: Option<PathBuf>,
    /// Parts that the domain has and no file here holds, for people.
    pub lacking: Vec<String>,
}

impl PartFiles {
    /// Finds them in the answer of `virsh dumpxml`.
    ///
    /// # Errors
    /// `ToolFailed` if it is not a domain.
    pub fn of(connect: &str, uuid: &str, text: &str) -> Result<PartFiles> {
        let parsing = ParsingOptions { nodes_limit: MAX_NODES, ..ParsingOptions::default() };
        let document = Document::parse_with_options(text, parsing).map_err(|error| {
            Error::with_source(ErrorKind::ToolFailed, "libvirt's XML of the domain", error)
        })?;
        let domain = document.root_element();
        let mut files = PartFiles::default();
        if let Some(nvram) = child(domain, "os").and_then(|os| child(os, "nvram")) {
            files.add_variables(nvram);
        }
        let devices = child(domain, "devices").into_iter().flat_map(|devices| devices.children());
        if let Some(tpm) = devices.into_iter().find(|device| tag(*device) == "tpm") {
            files.add_tpm(connect, uuid, tpm);
        }
        Ok(files)
    }

    fn add_variables(&mut self, nvram: Node<'_, '_>) {
        let source = child(nvram, "source").and_then(|source| source.attribute("file"));
        let path = source.or(nvram.text()).map(str::trim).filter(|path| path.starts_with('/'));
        self.is_qcow2 = nvram.attribute("format") == Some("qcow2");
        match (nvram.attribute("type"), path) {
            (None | Some("file"), Some(path)) => self.variables = Some(path.into()),
            (kind, _) => self.lacking.push(format!(
                "firmware variables in a {}, which is not read",
                kind.unwrap_or("place that libvirt does not report")
            )),
        }
    }

    fn add_tpm(&mut self, connect: &str, uuid: &str, tpm: Node<'_, '_>) {
        let backend = child(tpm, "backend");
        let has = |name: &str| backend.and_then(|backend| backend.attribute(name));
        let source = backend.and_then(|backend| child(backend, "source"));
        let place = source.map(|source| (source.attribute("type"), source.attribute("path")));
        match (has("type"), has("version"), place) {
            (Some("emulator"), Some("2.0"), None) => self.tpm = Some(tpm_state(connect, uuid)),
            (Some("emulator"), Some("2.0"), Some((Some("dir"), Some(path)))) => {
                self.tpm = Some(Path::new(path).join(PERMALL));
            }
            (Some("emulator"), Some("2.0"), _) => {
                self.lacking.push("the state of its TPM, which is not in a folder".to_owned());
            }
            (Some("emulator"), version, _) => self.lacking.push(format!(
                "the state of its TPM {}: only 2.0 is read",
                version.unwrap_or_default()
            )),
            _ => {
                self.lacking.push("the state of its TPM, which is a device of the host".to_owned())
            }
        }
        if backend.is_some_and(|backend| child(backend, "encryption").is_some()) {
            self.lacking.push(
                "the secret of libvirt that the state of its TPM is encrypted with: keep it \
                 (virsh secret-get-value)"
                    .to_owned(),
            );
        }
    }
}

/// Below a user's folder of configurations for an unprivileged libvirtd.
fn folder(connect: &str, of_system: &str, of_user: &str) -> PathBuf {
    if !connect.contains(":///session") {
        return PathBuf::from(of_system);
    }
    let variable = |name: &str| std::env::var_os(name).filter(|text| !text.is_empty());
    let home = || PathBuf::from(variable("HOME").unwrap_or_default()).join(".config");
    let configuration = variable("XDG_CONFIG_HOME").map_or_else(home, PathBuf::from);
    configuration.join(of_user)
}

/// libvirt's folder of firmware variables.
pub(super) fn variables_folder(connect: &str) -> PathBuf {
    folder(connect, VARIABLES, VARIABLES_OF_USER)
}

/// The state of the TPM of a domain without another place for it.
pub(super) fn tpm_state(connect: &str, uuid: &str) -> PathBuf {
    folder(connect, TPMS, TPMS_OF_USER).join(uuid).join("tpm2").join(PERMALL)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(os: &str, devices: &str) -> PartFiles {
        let text = format!("<domain><os>{os}</os><devices>{devices}</devices></domain>");
        PartFiles::of("qemu:///system", "u-1", &text).unwrap()
    }

    fn tpm(backend: &str) -> String {
        format!("<tpm model='tpm-crb'>{backend}</tpm>")
    }

    #[test]
    fn parts_are_where_libvirt_keeps_them() {
        let backend = "<backend type='emulator' version='2.0'/>";
        let files = of("<nvram template='/t'>/n/a_VARS.fd</nvram>", &tpm(backend));
        assert_eq!(files.variables, Some("/n/a_VARS.fd".into()));
        assert_eq!(files.tpm, Some("/var/lib/libvirt/swtpm/u-1/tpm2/tpm2-00.permall".into()));
        assert!(!files.is_qcow2 && files.lacking.is_empty());
        let files = of(
            "<nvram type='file' format='qcow2'><source file='/n/a.qcow2'/></nvram>",
            &tpm("<backend type='emulator' version='2.0'><source type='dir' path='/d'/></backend>"),
        );
        assert_eq!(files.variables, Some("/n/a.qcow2".into()));
        assert_eq!(files.tpm, Some("/d/tpm2-00.permall".into()));
        assert!(files.is_qcow2);
        assert_eq!(of("", ""), PartFiles::default());
    }

    #[test]
    fn parts_without_a_file_are_named() {
        for (os, backend) in [
            ("<nvram type='network'><source protocol='iscsi'/></nvram>", ""),
            ("", "<backend type='passthrough'><device path='/dev/tpm0'/></backend>"),
            ("", "<backend type='emulator' version='1.2'/>"),
            (
                "",
                "<backend type='emulator' version='2.0'><source type='file' path='/f'/></backend>",
            ),
        ] {
            let device = if backend.is_empty() { String::new() } else { tpm(backend) };
            let files = of(os, &device);
            assert_eq!((files.variables, files.tpm), (None, None), "{os}{backend}");
            assert_eq!(files.lacking.len(), 1, "{os}{backend}");
        }
    }
}
