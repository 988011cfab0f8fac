//! The domain of a recovered machine, from the XML stored with its restore point.
//!
//! The XML describes the host it came from, and it may be hostile: libvirtd acts as root. So the new text has only
//! elements of a known list, copied by their place in the source text or built here. No path of the stored XML
//! survives, except that of firmware in the folders of firmware. Everything left out is named.

use std::path::{Path, PathBuf};

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_host::Host;
use coldrise_store::DiskName;
use roxmltree::{Document, Node, ParsingOptions};
use serde::{Deserialize, Serialize};

use super::devices;
use super::tpm::emulated;
use super::uefi::{Boot, NotedVariables};
use coldrise_firmware::Uefi;
pub use coldrise_inventory::escaped;

/// Maximum number of elements and attributes.
const MAX_NODES: u32 = 100_000;
/// Elements of the domain that are kept as they are.
const KEPT: [&str; 12] = [
    "title",
    "description",
    "memory",
    "currentMemory",
    "maxMemory",
    "iothreads",
    "on_poweroff",
    "on_reboot",
    "on_crash",
    "pm",
    "genid",
    "vcpus",
];
/// Elements that are left out without a message: they say nothing about the machine. `resource` is its place among the
/// control groups of the old host.
const SILENT: [&str; 3] = ["metadata", "seclabel", "resource"];
/// The machine's network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NetworkChoice {
    /// The cards stay, their cables are pulled.
    None,
    /// As stored.
    Same,
    /// All cards in this network of libvirt.
    Named(String),
}

/// What the new domain gets.
pub struct DomainOptions<'a> {
    /// The host that runs it.
    pub host: &'a Host,
    /// A new name.
    pub name: Option<&'a str>,
    /// A new UUID, and new addresses of network cards.
    pub has_new_uuid: bool,
    /// The new UUID; `None`: libvirt makes one.
    pub new_uuid: Option<&'a str>,
    /// Whether the machine can have its TPM, else why not.
    pub tpm: std::result::Result<(), String>,
    /// The network.
    pub network: &'a NetworkChoice,
    /// The disks of the point, each with the name of its export.
    pub disks: Vec<(DiskName, String)>,
    /// The NBD server's socket.
    pub socket: &'a Path,
    /// Whether guests run under KVM there.
    pub has_kvm: bool,
    /// The UEFI firmware of that host.
    pub uefi: &'a [Uefi],
    /// The size of the stored variables, in bytes, if there are any: firmware that takes them is preferred.
    pub variables_bytes: Option<u64>,
    /// Where the variables of UEFI firmware lie. No other file of variables is used.
    pub variables: VariablesPlace,
}

/// The place of a machine's own firmware variables.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VariablesPlace {
    /// libvirt makes it from the template when the machine first starts.
    pub file: PathBuf,
    /// Must be there when the machine is started.
    pub template: PathBuf,
}

/// The new domain.
#[derive(Debug)]
pub struct DomainXml {
    /// For `virsh create`.
    pub text: String,
    /// Its name.
    pub name: String,
    /// Its UUID; `None` for a new one.
    pub uuid: Option<String>,
    /// Whether it has a TPM, whose state has to be placed.
    pub has_tpm: bool,
    /// Its own variables, if it starts by UEFI.
    pub variables: Option<NotedVariables>,
    /// Changes and omissions, for people.
    pub remarks: Vec<String>,
}

/// Checks that a domain can be rewritten.
///
/// # Errors
/// `InvalidInput` if it is not a domain of libvirt.
pub fn check_domain(source: &str) -> Result<()> {
    let options = DomainOptions {
        host: &Host::here(),
        name: None,
        has_new_uuid: false,
        new_uuid: None,
        tpm: Ok(()),
        network: &NetworkChoice::None,
        disks: Vec::new(),
        socket: Path::new("/"),
        has_kvm: true,
        uefi: &[],
        variables_bytes: None,
        variables: VariablesPlace { file: PathBuf::new(), template: PathBuf::new() },
    };
    rewrite(source, &options).map(drop)
}

/// Rewrites a stored domain.
///
/// # Errors
/// `InvalidInput` if it is not a domain of libvirt.
pub fn rewrite(source: &str, options: &DomainOptions<'_>) -> Result<DomainXml> {
    // A document type is refused, and with it all entities but the five of XML.
    let parsing = ParsingOptions { nodes_limit: MAX_NODES, ..ParsingOptions::default() };
    let document = Document::parse_with_options(source, parsing).map_err(|error| {
        Error::with_source(ErrorKind::InvalidInput, "the stored XML is not well-formed", error)
    })?;
    let domain = document.root_element();
    if !domain.has_tag_name("domain") || child(domain, "os").is_none() {
        let text = "the stored XML is not a domain of libvirt";
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    let stored = child_text(domain, "name").unwrap_or("recovered");
    let name = match (options.name, options.has_new_uuid) {
        (Some(name), _) => name.to_owned(),
        (None, true) => format!("{stored}-recovered"),
        (None, false) => stored.to_owned(),
    };
    let uuid = match options.has_new_uuid {
        true => options.new_uuid.map(str::to_owned),
        false => child_text(domain, "uuid").map(str::to_owned),
    };
    let kind = if options.has_kvm { "kvm" } else { "qemu" };
    let mut text = format!("<domain type='{kind}'>\n<name>{}</name>\n", escaped(&name));
    if let Some(uuid) = &uuid {
        text.push_str(&format!("<uuid>{}</uuid>\n", escaped(uuid)));
    }
    let mut remarks = Vec::new();
    let mut variables = None;
    for node in domain.children().filter(Node::is_element) {
        let kept = match tag(node) {
            "os" => {
                let boot = Boot::stored(source, node, options, &mut remarks);
                variables = boot.variables;
                Some(boot.text)
            }
            _ => element(source, node, options, &mut remarks),
        };
        if let Some(kept) = kept {
            text.push_str(&kept);
            text.push('\n');
        }
    }
    text.push_str("</domain>\n");
    let has_tpm = options.tpm.is_ok() && child(domain, "devices").and_then(emulated).is_some();
    Ok(DomainXml { text, name, uuid, has_tpm, variables, remarks })
}

/// An element of the domain; `None` if it is left out.
fn element(
    source: &str,
    node: Node<'_, '_>,
    options: &DomainOptions<'_>,
    remarks: &mut Vec<String>,
) -> Option<String> {
    let tag = tag(node);
    match tag {
        "name" | "uuid" => None,
        "vcpu" => Some(vcpu(node)),
        "cpu" => {
            // Host models exist under KVM only.
            let mode = node.attribute("mode").unwrap_or("custom");
            let is_of_host = mode.starts_with("host-");
            Some(match is_of_host && !options.has_kvm {
                true => "<cpu mode='maximum'/>".to_owned(),
                false => span(source, node).to_owned(),
            })
        }
        "features" if options.has_kvm => Some(span(source, node).to_owned()),
        "features" => Some(filtered(source, node, &["acpi", "apic", "pae", "smm"])),
        "clock" if options.has_kvm => Some(span(source, node).to_owned()),
        "clock" => Some(match node.attribute("offset") {
            Some("localtime") => "<clock offset='localtime'/>".to_owned(),
            _ => "<clock offset='utc'/>".to_owned(),
        }),
        "sysinfo" if node.attribute("type") == Some("smbios") => {
            Some(span(source, node).to_owned())
        }
        "devices" => Some(devices::devices(source, node, options, remarks)),
        _ if KEPT.contains(&tag) => Some(span(source, node).to_owned()),
        _ => {
            if !SILENT.contains(&tag) {
                let name = if tag.is_empty() { node.tag_name().name() } else { tag };
                remarks.push(format!("left out: {}", escaped(name)));
            }
            None
        }
    }
}

/// The number of processors, without the host's processors they were bound to.
fn vcpu(node: Node<'_, '_>) -> String {
    let number = |text: &str| text.trim().parse::<u32>().ok();
    let current = node.attribute("current").and_then(number);
    let current = current.map(|current| format!(" current='{current}'")).unwrap_or_default();
    let all = node.text().and_then(number).unwrap_or(1);
    format!("<vcpu{current}>{all}</vcpu>")
}

/// The element with those of its children that are in the list.
pub(super) fn filtered(source: &str, node: Node<'_, '_>, children: &[&str]) -> String {
    let tag = tag(node);
    let kept = node.children().filter(|child| children.contains(&self::tag(*child)));
    let kept: Vec<&str> = kept.map(|child| span(source, child)).collect();
    format!("<{tag}>{}</{tag}>", kept.concat())
}

/// The name of an element without a namespace; empty for anything else.
pub(super) fn tag<'a>(node: Node<'a, '_>) -> &'a str {
    let name = node.tag_name();
    if node.is_element() && name.namespace().is_none() { name.name() } else { "" }
}

/// The element as it stands in the source text.
pub(super) fn span<'s>(source: &'s str, node: Node<'_, '_>) -> &'s str {
    source.get(node.range()).unwrap_or_default()
}

pub(super) fn child<'a, 'i>(node: Node<'a, 'i>, name: &str) -> Option<Node<'a, 'i>> {
    node.children().find(|child| tag(*child) == name)
}

fn child_text<'a>(node: Node<'a, '_>, name: &str) -> Option<&'a str> {
    child(node, name).and_then(|child| child.text()).map(str::trim).filter(|text| !text.is_empty())
}

#[cfg(test)]
#[path = "domain_xml_tests.rs"]
mod tests;
