//! The disks of a domain and their block copies, as libvirt tells them.

use coldrise_block::{Error, ErrorKind, Result};

use super::target::OpenTarget;
use crate::libvirt::{Domain, DomainState, PATIENCE};

/// A disk in the domain's present XML.
pub(super) struct LiveDisk {
    /// Its name in the domain, such as `vda`.
    pub(super) device: String,
    /// Its export, file or block device.
    pub(super) source: String,
    /// The copy of a running job has caught up.
    pub(super) is_ready: bool,
}

/// The present disks of the domain.
pub(super) fn live_disks(domain: &Domain) -> Result<Vec<LiveDisk>> {
    let text = domain.virsh.run(&["dumpxml", &domain.name], PATIENCE)?;
    let document = roxmltree::Document::parse(&text).map_err(|error| {
        Error::with_source(ErrorKind::ToolFailed, "libvirt's XML is not well-formed", error)
    })?;
    let disks = document.descendants().filter(|node| node.has_tag_name("disk"));
    let live = disks.filter_map(|disk| {
        let child = |name| disk.children().find(|node| node.has_tag_name(name));
        let device = child("target")?.attribute("dev")?.to_owned();
        let source = child("source")?;
        let source = ["name", "file", "dev"].into_iter().find_map(|name| source.attribute(name))?;
        let is_ready = child("mirror").is_some_and(|node| node.attribute("ready") == Some("yes"));
        Some(LiveDisk { device, source: source.to_owned(), is_ready })
    });
    Ok(live.collect())
}

/// Starts the copy of a disk. libvirt makes the image in a file; a block device is taken as it is. Of a larger device the
/// machine sees as much as the disk has: QEMU refuses targets of another size.
pub(super) fn start_copy(
    domain: &Domain,
    device: &str,
    target: &OpenTarget,
    rate: Option<u64>,
) -> Result<()> {
    let path = crate::libvirt::escaped(&target.path.to_string_lossy());
    let (format, size_bytes) = (target.format.word(), target.size_bytes);
    let source = match target.facts.device_bytes {
        None => format!("<source file='{path}'/>"),
        Some(bytes) if bytes == size_bytes => format!("<source dev='{path}'/>"),
        Some(_) => format!(
            "<source dev='{path}'><slices><slice type='storage' offset='0' size='{size_bytes}'/></slices></source>"
        ),
    };
    let kind = if target.facts.device_bytes.is_some() { "block" } else { "file" };
    // As for a QEMU of our own.
    let cache = if target.facts.is_direct { " cache='none'" } else { "" };
    let xml = format!(
        "<disk type='{kind}' device='disk'><driver name='qemu' type='{format}' discard='unmap'{cache}/>{source}</disk>"
    );
    let mut words = vec!["blockcopy", &domain.name, device, "--xml", "/dev/stdin"];
    let rate = rate.map(|rate| rate.to_string());
    if let Some(rate) = &rate {
        words.extend(["--bytes", "--bandwidth", rate]);
    }
    if target.facts.device_bytes.is_some() {
        words.push("--reuse-external");
    }
    words.push("--transient-job");
    domain.virsh.run_with(&words, Some(&xml), PATIENCE).map(drop)
}

/// Switches each disk that is not yet switched.
pub(super) fn pivot(domain: &Domain, devices: &[String]) -> Result<()> {
    let mut done = Ok(());
    for device in devices {
        let live = live_disks(domain)?;
        if live.iter().any(|live| live.device == *device && live.is_ready) {
            let words = ["blockjob", &domain.name, device, "--pivot"];
            done = done.and(domain.virsh.run(&words, PATIENCE).map(drop));
        }
    }
    done
}

/// Ends the copies; the domain keeps its disks.
///
/// # Errors
/// `ToolFailed` if one still runs, or if libvirt does not say that it has ended.
pub(super) fn abort(domain: &Domain, devices: &[String]) -> Result<()> {
    for device in devices {
        // Fails if there is no job.
        let _ = domain.virsh.run(&["blockjob", &domain.name, device, "--abort"], PATIENCE);
    }
    for device in devices {
        let words = ["blockjob", &domain.name, device, "--info", "--raw"];
        match domain.virsh.run(&words, PATIENCE) {
            Ok(answer) if answer.contains("cur=") => {
                let text = format!("the copy of {device} does not end");
                return Err(Error::new(ErrorKind::ToolFailed, text));
            }
            Ok(_) => {}
            Err(_) if domain.state()? == DomainState::Off => return Ok(()),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
