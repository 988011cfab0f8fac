//! The devices of a recovered machine.

use coldrise_store::DiskName;
use roxmltree::Node;

use super::domain_xml::{DomainOptions, NetworkChoice, child, escaped, span, tag};
use super::tpm;

/// Devices that are kept as they are.
const KEPT: [&str; 6] = ["controller", "hub", "memballoon", "panic", "video", "watchdog"];
/// Parts of a disk that are kept.
const OF_DISK: [&str; 9] =
    ["target", "address", "serial", "boot", "wwn", "vendor", "product", "blockio", "geometry"];
/// Connections of serial ports and channels that name no file.
const CONNECTIONS: [&str; 4] = ["pty", "null", "unix", "spicevmc"];

/// All devices.
pub(super) fn devices(
    source: &str,
    node: Node<'_, '_>,
    options: &DomainOptions<'_>,
    remarks: &mut Vec<String>,
) -> String {
    let disks: Vec<_> = node.children().filter(|node| is_disk(*node)).collect();
    let chosen = assign(&disks, &options.disks);
    let mut text = String::from("<devices>\n");
    for device in node.children().filter(Node::is_element) {
        let at = disks.iter().position(|disk| *disk == device);
        let kept = match at.and_then(|at| chosen.get(at).copied().flatten()) {
            Some(i) => {
                options.disks.get(i).map(|(_, export)| disk(source, device, export, options))
            }
            None => other(source, device, options, remarks),
        };
        text.extend(kept.map(|kept| kept + "\n"));
    }
    for (i, (name, _)) in options.disks.iter().enumerate() {
        if !chosen.contains(&Some(i)) {
            remarks.push(format!("disk {name} is not in the stored XML, so it is not attached"));
        }
    }
    text.push_str("</devices>");
    text
}

fn is_disk(node: Node<'_, '_>) -> bool {
    tag(node) == "disk" && matches!(node.attribute("device"), None | Some("disk") | Some("lun"))
}

fn target<'a>(node: Node<'a, '_>) -> &'a str {
    child(node, "target").and_then(|target| target.attribute("dev")).unwrap_or_default()
}

/// The point's disk for each stored one: by its name in the machine; if none has such a name, in order.
fn assign(stored: &[Node<'_, '_>], disks: &[(DiskName, String)]) -> Vec<Option<usize>> {
    let by_name: Vec<Option<usize>> = stored
        .iter()
        .map(|node| disks.iter().position(|(name, _)| name.as_str() == target(*node)))
        .collect();
    if by_name.iter().all(Option::is_none) && stored.len() == disks.len() {
        return (0..disks.len()).map(Some).collect();
    }
    by_name
}

/// A disk on the NBD server. When the server is away, the machine is paused, and sees no error.
fn disk(source: &str, node: Node<'_, '_>, export: &str, options: &DomainOptions<'_>) -> String {
    let kept = node.children().filter(|child| OF_DISK.contains(&tag(*child)));
    let kept: Vec<&str> = kept.map(|child| span(source, child)).collect();
    disk_element(export, options, &kept.concat())
}

/// A disk with these parts.
pub(super) fn disk_element(export: &str, options: &DomainOptions<'_>, parts: &str) -> String {
    format!(
        "<disk type='network' device='disk'><driver name='qemu' type='raw' cache='none' \
         discard='unmap' error_policy='stop' rerror_policy='stop'/><source protocol='nbd' \
         name='{}'><host transport='unix' socket='{}'/></source>{parts}</disk>",
        escaped(export),
        escaped(&options.socket.display().to_string())
    )
}

/// A device that is not a disk of the point; `None` if it is left out.
fn other(
    source: &str,
    node: Node<'_, '_>,
    options: &DomainOptions<'_>,
    remarks: &mut Vec<String>,
) -> Option<String> {
    let kind = node.attribute("type").unwrap_or_default();
    let kept = match tag(node) {
        // libvirt knows its own.
        "emulator" => return None,
        "disk" if !is_disk(node) => {
            if child(node, "source").is_some() {
                remarks.push(format!("drive {} is empty", escaped(target(node))));
            }
            let word = if node.attribute("device") == Some("floppy") { "floppy" } else { "cdrom" };
            Some(parts(
                source,
                node,
                &format!("disk type='file' device='{word}'"),
                "disk",
                &["target", "address", "boot", "readonly"],
            ))
        }
        "interface" => return interface(source, node, options, remarks),
        "serial" | "console" | "channel" => connection(source, node, kind),
        "graphics" => match kind {
            "vnc" | "spice" => Some(format!(
                "<graphics type='{kind}' autoport='yes'><listen type='address' \
                 address='127.0.0.1'/></graphics>"
            )),
            _ => None,
        },
        "input" if ["mouse", "tablet", "keyboard"].contains(&kind) => {
            Some(span(source, node).to_owned())
        }
        "rng" => Some(parts(source, node, "rng model='virtio'", "rng", &["address"]).replacen(
            '>',
            "><backend model='random'>/dev/urandom</backend>",
            1,
        )),
        "tpm" if options.tpm.is_ok() && node.parent().and_then(tpm::emulated) == Some(node) => {
            Some(tpm::element(source, node))
        }
        tag if KEPT.contains(&tag) => Some(span(source, node).to_owned()),
        _ => None,
    };
    if let (None, "tpm", Err(why)) = (&kept, tag(node), &options.tpm) {
        remarks.push(why.clone());
    } else if kept.is_none() {
        let name = match (tag(node), target(node)) {
            ("disk", name) => format!("disk {name}, which is not in the restore point"),
            (tag, _) => format!("{tag} {kind}"),
        };
        remarks.push(format!("left out: {}", escaped(name.trim_end())));
    }
    kept
}

/// A serial port or a channel. libvirt chooses paths of sockets.
fn connection(source: &str, node: Node<'_, '_>, kind: &str) -> Option<String> {
    let tag = tag(node);
    let kind = match CONNECTIONS.iter().find(|known| **known == kind) {
        // A serial port on a socket would need a path.
        Some(known) if tag == "channel" || ["pty", "null"].contains(known) => known,
        _ if tag == "channel" => return None,
        _ => "pty",
    };
    Some(parts(source, node, &format!("{tag} type='{kind}'"), tag, &["target", "address"]))
}

/// A network card. A machine of the past must not talk to the present without being asked.
fn interface(
    source: &str,
    node: Node<'_, '_>,
    options: &DomainOptions<'_>,
    remarks: &mut Vec<String>,
) -> Option<String> {
    let kind = node.attribute("type").unwrap_or_default();
    let mut kept = vec!["model", "address", "boot", "mtu"];
    if !options.has_new_uuid {
        kept.push("mac");
    }
    match options.network {
        NetworkChoice::None => {
            Some(parts(source, node, "interface type='user'", "interface", &kept).replacen(
                '>',
                "><link state='down'/>",
                1,
            ))
        }
        NetworkChoice::Named(network) => {
            let network = format!("><source network='{}'/>", escaped(network));
            let card = parts(source, node, "interface type='network'", "interface", &kept);
            Some(card.replacen('>', &network, 1))
        }
        NetworkChoice::Same if ["network", "bridge", "user", "direct"].contains(&kind) => {
            kept.extend(["source", "vlan", "virtualport", "link"]);
            Some(parts(source, node, &format!("interface type='{kind}'"), "interface", &kept))
        }
        NetworkChoice::Same => {
            remarks.push(format!("left out: interface {}", escaped(kind)));
            None
        }
    }
}

/// A new element with copies of those children.
fn parts(
    source: &str,
    node: Node<'_, '_>,
    start: &str,
    tag_name: &str,
    children: &[&str],
) -> String {
    let kept = node.children().filter(|child| children.contains(&tag(*child)));
    let kept: Vec<&str> = kept.map(|child| span(source, child)).collect();
    format!("<{start}>{}</{tag_name}>", kept.concat())
}
