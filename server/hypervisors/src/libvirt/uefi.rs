//! How a recovered domain starts: its `<os>`, and its own variables if it starts by UEFI.
//!
//! A domain never gets the file of variables that its stored XML names. It may belong to the original machine, which
//! runs or will run again, and two machines on one file destroy each other's boot order. So the file has a name that
//! only this session has. libvirt makes it, from a template of ours with the stored variables, when the machine first starts, in its
//! own folder and for its own user; there it can stay when the machine is moved to production.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use coldrise_block::Result;
use coldrise_host::Host;
use coldrise_session::{SessionDocument, update_parts};
use coldrise_store::{
    FIRMWARE_VARIABLES, MAX_PART_BYTES, MachinePart, RAW, Repository, SWTPM_PERMALL, SessionName,
    TPM_STATE,
};
use roxmltree::Node;
use serde::{Deserialize, Serialize};

use super::domain_xml::{DomainOptions, VariablesPlace, child, escaped, span, tag};
use super::part_files::variables_folder;
use super::tpm;
use super::{PATIENCE, RecoveryNote};
use coldrise_firmware::{Found, UefiNeeds, first_variables};

/// Where distributions keep firmware.
const FIRMWARE: [&str; 3] = ["/usr/share/", "/usr/lib/", "/etc/qemu/"];
/// How long another command may take to remove the same variables.
const REMOVAL_PATIENCE: Duration = Duration::from_secs(5);
const REMOVAL_INTERVAL: Duration = Duration::from_millis(200);
/// Maximum length of a file of empty variables, in bytes.
const MAX_VARIABLES_BYTES: u64 = 16 << 20;

/// The `<os>` of a domain.
pub(super) struct Boot {
    pub(super) text: String,
    pub(super) variables: Option<NotedVariables>,
}

impl Boot {
    /// The boot settings of a domain without stored XML.
    pub(super) fn plain(is_uefi: bool, options: &DomainOptions<'_>) -> Boot {
        let parts = "<type arch='x86_64' machine='pc'>hvm</type>".to_owned();
        if is_uefi {
            return Boot::uefi(parts, None, UefiNeeds::default(), options);
        }
        Boot { text: format!("<os>{parts}</os>"), variables: None }
    }

    /// The settings from a stored `<os>`. Firmware is kept where the host has it. A kernel outside the disks is not: its files are not
    /// in the backup.
    pub(super) fn stored(
        source: &str,
        node: Node<'_, '_>,
        options: &DomainOptions<'_>,
        remarks: &mut Vec<String>,
    ) -> Boot {
        let mut parts = String::new();
        for part in node.children().filter(Node::is_element) {
            match tag(part) {
                "type" | "boot" | "bootmenu" | "bios" | "smbios" => {
                    parts.push_str(span(source, part))
                }
                "loader" | "nvram" | "firmware" => {}
                other => remarks.push(format!("left out: {} of os", escaped(other))),
            }
        }
        let loader = child(node, "loader");
        let path = loader.and_then(|loader| loader.text()).unwrap_or_default().trim();
        let is_here = is_firmware(path) && options.host.file_bytes(Path::new(path)).is_some();
        if !path.is_empty() && !is_here {
            let why = match is_firmware(path) {
                true => "is not here",
                false => "is not used: it lies outside the folders of firmware",
            };
            remarks.push(format!("loader {} {why}", escaped(path)));
        }
        let has =
            |name: &str, value: &str| loader.is_some_and(|l| l.attribute(name) == Some(value));
        let is_flash = has("type", "pflash");
        if has("stateless", "yes") || !(is_flash || node.attribute("firmware") == Some("efi")) {
            // Firmware without variables.
            parts.extend(loader.filter(|_| is_here).map(|loader| span(source, loader)));
            return Boot { text: format!("<os>{parts}</os>"), variables: None };
        }
        let feature = |name: &str| {
            let features = child(node, "firmware").into_iter().flat_map(|parent| parent.children());
            let mut named = features.filter(|feature| feature.attribute("name") == Some(name));
            named.find_map(|feature| feature.attribute("enabled")).map(|enabled| enabled == "yes")
        };
        let secure_boot = has("secure", "yes") || feature("secure-boot") == Some(true);
        let kind = child(node, "type");
        let machine = kind.and_then(|kind| kind.attribute("machine"));
        let arch = kind.and_then(|kind| kind.attribute("arch"));
        let needs = UefiNeeds {
            is_foreign: arch.is_some_and(|arch| arch != "x86_64"),
            is_q35: machine.is_some_and(|machine| machine.contains("q35")),
            secure_boot,
            enrolled_keys: feature("enrolled-keys") == Some(true),
        };
        let is_raw = loader.is_some_and(|l| matches!(l.attribute("format"), None | Some("raw")));
        let template = child(node, "nvram").and_then(|nvram| nvram.attribute("template"));
        let kept = (is_here && is_flash && is_raw).then(|| (Path::new(path), template));
        Boot::uefi(parts, kept, needs, options)
    }

    /// `kept`: the stored firmware, which the host has, and the stored name of its empty variables.
    fn uefi(
        parts: String,
        kept: Option<(&Path, Option<&str>)>,
        needs: UefiNeeds,
        options: &DomainOptions<'_>,
    ) -> Boot {
        let stored = kept.and_then(|(code, template)| {
            let (empty, bytes) = empty_variables(code, template, options)?;
            Some((code.to_owned(), empty, bytes))
        });
        // The keys of Secure Boot lie in the variables: with stored ones any firmware of their size does.
        let any_keys = UefiNeeds { enrolled_keys: !needs.enrolled_keys, ..needs };
        let fitting = [needs, any_keys]
            .into_iter()
            .flat_map(|needs| options.uefi.iter().filter(move |uefi| uefi.fits(needs)));
        let fitting =
            fitting.map(|uefi| (uefi.code.clone(), uefi.variables.clone(), uefi.variables_bytes));
        let candidates: Vec<(PathBuf, PathBuf, u64)> = stored.into_iter().chain(fitting).collect();
        let takes_stored = |(_, _, bytes): &&(PathBuf, PathBuf, u64)| {
            options.variables_bytes.is_none_or(|stored| stored == *bytes)
        };
        let chosen = candidates.iter().find(takes_stored).or(candidates.first()).cloned();
        let shown = |path: &Path| escaped(&path.display().to_string());
        let file = shown(&options.variables.file);
        let place = options.variables.clone();
        let Some((code, empty, _)) = chosen else {
            // libvirt reports it if it finds none either.
            let text = format!("<os firmware='efi'>{parts}<nvram>{file}</nvram></os>");
            return Boot { text, variables: Some(NotedVariables { empty: None, place }) };
        };
        let secure = if needs.secure_boot { "yes" } else { "no" };
        let text = format!(
            "<os>{parts}<loader readonly='yes' secure='{secure}' type='pflash'>{}</loader><nvram \
             template='{}'>{file}</nvram></os>",
            shown(&code),
            shown(&place.template)
        );
        Boot { text, variables: Some(NotedVariables { empty: Some(empty), place }) }
    }
}

/// The empty variables for firmware of the host, and their size in bytes: by the stored XML, by the firmware's descriptor,
/// or by its name.
fn empty_variables(
    code: &Path,
    template: Option<&str>,
    options: &DomainOptions<'_>,
) -> Option<(PathBuf, u64)> {
    let stored = template.filter(|template| is_firmware(template)).map(PathBuf::from);
    let described = options.uefi.iter().find(|uefi| uefi.code == code);
    let described = described.map(|uefi| uefi.variables.clone());
    let name = code.file_name()?.to_str()?.replace("_CODE", "_VARS");
    let beside = code.with_file_name(name);
    let candidates = [stored, described, Some(beside)].into_iter().flatten();
    let mut others = candidates.filter(|path| path != code);
    others.find_map(|path| options.host.file_bytes(&path).map(|bytes| (path, bytes)))
}

fn is_firmware(path: &str) -> bool {
    FIRMWARE.iter().any(|folder| path.starts_with(folder)) && !path.contains("..")
}

impl VariablesPlace {
    /// For a session's machine: in libvirt's folder, under a name that no other session has; the template beside the
    /// socket of the disks.
    pub fn of(connect: &str, session: &SessionDocument, socket: &Path) -> VariablesPlace {
        let mut template = socket.as_os_str().to_owned();
        template.push(".vars");
        let name = format!("{}-{:x}_VARS.fd", session.name, session.created_at_ms);
        VariablesPlace { file: variables_folder(connect).join(name), template: template.into() }
    }
}

/// The firmware variables of a recovered machine, in its note.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotedVariables {
    /// The firmware's own, empty ones; `None` if libvirt chose the firmware.
    pub empty: Option<PathBuf>,
    /// The machine's.
    pub place: VariablesPlace,
}

impl RecoveryNote {
    /// Writes the template of the machine's variables: the stored ones, else new ones with boot entries for the loaders on its
    /// disks, which are returned. libvirt uses it only if the machine has no variables yet.
    ///
    /// # Errors
    /// Errors of the host's operating system.
    pub fn write_variables(
        &self,
        host: &Host,
        repository: &Arc<Repository>,
        session: &SessionDocument,
    ) -> Result<Option<Found>> {
        let Some(NotedVariables { empty, place }) = &self.variables else { return Ok(None) };
        let Some(empty) = empty else {
            let unread =
                vec!["libvirt chooses the firmware, which has no descriptor here".to_owned()];
            return Ok(Some(Found { unread, has_fallback: true, ..Found::default() }));
        };
        let empty = host.read_file(empty, MAX_VARIABLES_BYTES)?;
        let (template, found) = first_variables(repository, session, empty);
        host.write_file(&place.template, &template, false)?;
        Ok(found)
    }

    /// Puts the state of the machine's TPM where libvirt expects it, unless it ran before.
    ///
    /// # Errors
    /// Errors of the host's operating system.
    pub fn place_tpm(&self, host: &Host, session: &SessionDocument) -> Result<()> {
        self.tpm.as_deref().map_or(Ok(()), |file| tpm::place(host, session, file))
    }

    /// Keeps the variables and the TPM's state of the machine with its session: the next seal takes them over.
    ///
    /// # Errors
    /// Those of the operating system for one of them; the other is kept.
    pub fn keep_parts(
        &self,
        host: &Host,
        repository: &Repository,
        session: &SessionName,
    ) -> Result<()> {
        let variables = self.variables.as_ref().map(|noted| noted.place.file.as_path());
        let files =
            [(FIRMWARE_VARIABLES, RAW, variables), (TPM_STATE, SWTPM_PERMALL, self.tpm.as_deref())];
        let (mut parts, mut failed) = (Vec::new(), Ok(()));
        for (kind, format, file) in files {
            // There is none before the machine's first start.
            let Some(file) = file else { continue };
            if let [None] = host.look([file])? {
                continue;
            }
            match host
                .read_file(file, MAX_PART_BYTES)
                .and_then(|content| MachinePart::new(kind, format, &content))
            {
                Ok(part) => parts.push(part),
                Err(error) => failed = Err(error),
            }
        }
        update_parts(repository, session, parts).and(failed)
    }

    /// Removes the template; the machine has its variables.
    pub fn remove_template(&self, host: &Host) {
        if let Some(noted) = &self.variables {
            let _ = host.remove_file(&noted.place.template);
        }
    }

    /// Removes the machine's variables and its TPM's state when its session has ended. Only libvirt may remove files in its folder of
    /// variables, and it does so with a domain: one is defined for that, and never started.
    ///
    /// # Errors
    /// `ToolFailed` if libvirt does not do so; errors of the host's operating system.
    pub fn remove_parts(&self, host: &Host) -> Result<()> {
        let removed = match &self.tpm {
            Some(file) => tpm::remove(&self.domain(host).virsh, file),
            None => Ok(()),
        };
        self.remove_variables(host).and(removed)
    }

    fn remove_variables(&self, host: &Host) -> Result<()> {
        let Some(noted) = &self.variables else { return Ok(()) };
        self.remove_template(host);
        let file = &noted.place.file;
        let stem = file.file_stem().unwrap_or_default().to_string_lossy();
        let name = format!("coldrise-{stem}");
        let xml = format!(
            "<domain type='qemu'><name>{name}</name><memory unit='MiB'>1</memory><os><type arch='x86_64' \
             machine='pc'>hvm</type><loader readonly='yes' type='pflash'>/nonexistent</loader><nvram>{}</nvram></os>\
             <features><acpi/></features></domain>",
            escaped(&file.display().to_string())
        );
        let virsh = self.domain(host).virsh;
        let started = Instant::now();
        loop {
            // A removal that was killed leaves it defined.
            let defined = virsh.run_with(&["define", "/dev/stdin"], Some(&xml), PATIENCE);
            let removed = virsh.run(&["undefine", "--nvram", &name], PATIENCE);
            let Err(error) = removed.or_else(|error| defined.and(Err(error))) else {
                return Ok(());
            };
            // Another command may remove it at the same time.
            if let [None] = host.look([file])? {
                return Ok(());
            }
            if started.elapsed() >= REMOVAL_PATIENCE {
                return Err(error.advise(format!("remove {}", file.display())));
            }
            std::thread::sleep(REMOVAL_INTERVAL);
        }
    }
}
