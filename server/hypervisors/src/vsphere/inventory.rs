//! Hosts, datastores and machines of the inventory.

use std::net::IpAddr;

use coldrise_block::{Error, ErrorKind, Result};
use roxmltree::Node;

use super::client::Client;
use super::soap::{Reference, child, child_text, copied, escaped, objects, type_of};

/// A host that runs machines.
#[derive(Clone, Debug)]
pub(super) struct Host {
    pub(super) reference: Reference,
    pub(super) name: String,
    /// The cluster, or the host alone: it has the resource pool.
    pub(super) compute: Option<Reference>,
    pub(super) datastore_system: Option<Reference>,
    pub(super) datastores: Vec<Reference>,
    /// The addresses of its own (VMkernel) network cards: from these it reaches NFS servers.
    pub(super) addresses: Vec<IpAddr>,
    pub(super) is_connected: bool,
}

/// All hosts.
///
/// # Errors
/// As [`Client::call`].
pub(super) fn hosts(client: &Client<'_>) -> Result<Vec<Host>> {
    const NAMES: [&str; 6] = [
        "name",
        "parent",
        "datastore",
        "configManager.datastoreSystem",
        "config.network.vnic",
        "runtime.connectionState",
    ];
    let answer = client.all("HostSystem", &NAMES)?;
    let document = answer.document()?;
    let hosts = objects(&document).map(|found| {
        let cards = found.value("config.network.vnic").into_iter().flat_map(|all| all.children());
        let address = |card| {
            let ip = child(child(card, "spec")?, "ip")?;
            child_text(ip, "ipAddress")?.parse().ok()
        };
        Host {
            name: found.text("name"),
            compute: found.value("parent").and_then(Reference::of),
            datastore_system: found.value("configManager.datastoreSystem").and_then(Reference::of),
            datastores: found.references("datastore"),
            addresses: cards.filter_map(address).collect(),
            is_connected: found.text("runtime.connectionState") == "connected",
            reference: found.reference,
        }
    });
    Ok(hosts.collect())
}

/// The hosts of these names, in their order; the only host if none is named. A name may leave out its domain.
///
/// # Errors
/// `NotFound`, `InvalidInput` if a name is needed; `Busy` if one is not connected.
pub(super) fn choose(hosts: &[Host], names: &[String]) -> Result<Vec<Host>> {
    let existing = || hosts.iter().map(|host| host.name.as_str()).collect::<Vec<_>>().join(", ");
    let chosen = match (names, hosts) {
        ([], [only]) => vec![only.clone()],
        ([], _) => {
            let text = format!("which host should run the machine? There are: {}", existing());
            return Err(Error::new(ErrorKind::InvalidInput, text).advise("give --host NAME"));
        }
        _ => names.iter().map(|name| host(hosts, name, &existing)).collect::<Result<_>>()?,
    };
    if let Some(away) = chosen.iter().find(|host| !host.is_connected) {
        let text = format!("the host {} is not connected", away.name);
        return Err(Error::new(ErrorKind::Busy, text).advise("choose another --host"));
    }
    Ok(chosen)
}

fn host(hosts: &[Host], name: &str, existing: &impl Fn() -> String) -> Result<Host> {
    let is_named = |host: &&Host| host.name.eq_ignore_ascii_case(name);
    let is_short = |host: &&Host| {
        host.name.split('.').next().is_some_and(|short| short.eq_ignore_ascii_case(name))
    };
    let found = hosts.iter().find(is_named).or_else(|| hosts.iter().find(is_short));
    found.cloned().ok_or_else(|| {
        Error::new(
            ErrorKind::NotFound,
            format!("there is no host {name}; there are: {}", existing()),
        )
    })
}

/// A datastore.
#[derive(Clone, Debug)]
pub(super) struct Datastore {
    pub(super) reference: Reference,
    pub(super) name: String,
    /// Server and path, if it is on NFS.
    pub(super) nas: Option<(String, String)>,
    /// The machines that have files there.
    pub(super) machines: Vec<Reference>,
}

/// The datastores with these references.
///
/// # Errors
/// As [`Client::call`].
pub(super) fn datastores(client: &Client<'_>, references: &[Reference]) -> Result<Vec<Datastore>> {
    if references.is_empty() {
        return Ok(Vec::new());
    }
    let answer = client.properties(references, &["name", "info", "vm"])?;
    let document = answer.document()?;
    let found = objects(&document).map(|found| {
        let nas = found.value("info").and_then(|info| child(info, "nas"));
        let part = |name| nas.and_then(|nas| child_text(nas, name)).map(str::to_owned);
        Datastore {
            name: found.text("name"),
            nas: part("remoteHost").zip(part("remotePath")),
            machines: found.references("vm"),
            reference: found.reference,
        }
    });
    Ok(found.collect())
}

/// Where a new machine goes.
pub(super) struct Place {
    pub(super) folder: Reference,
    pub(super) pool: Reference,
}

/// The resource pool of a host, and the folder for machines of its datacenter.
///
/// # Errors
/// As [`Client::call`]; `Unsupported` if the inventory has another form.
pub(super) fn place(client: &Client<'_>, host: &Host) -> Result<Place> {
    let missing = || {
        let text = format!("the host {} is in no datacenter", host.name);
        Error::new(ErrorKind::Unsupported, text)
    };
    let compute = host.compute.clone().ok_or_else(missing)?;
    let pool = reference(client, &compute, "resourcePool")?.ok_or_else(missing)?;
    let mut at = compute;
    // Folders can be nested; more than this is a circle.
    for _ in 0..64 {
        if at.kind == "Datacenter" {
            let folder = reference(client, &at, "vmFolder")?.ok_or_else(missing)?;
            return Ok(Place { folder, pool });
        }
        at = reference(client, &at, "parent")?.ok_or_else(missing)?;
    }
    Err(missing())
}

fn reference(client: &Client<'_>, object: &Reference, name: &str) -> Result<Option<Reference>> {
    let answer = client.properties(std::slice::from_ref(object), &[name])?;
    let document = answer.document()?;
    let found = objects(&document).next().and_then(|found| found.value(name));
    Ok(found.and_then(Reference::of))
}

/// A machine's state.
#[derive(Clone, Debug)]
pub(super) struct Machine {
    pub(super) reference: Reference,
    pub(super) name: String,
    /// The path of its .vmx, as `[DATASTORE] PATH`.
    pub(super) path: String,
    pub(super) datastores: Vec<Reference>,
    pub(super) is_on: bool,
    /// The network cards with pulled cables, for [`card_changes`].
    pub(super) cards: Vec<String>,
}

/// The state of a machine; `None` if it is not in the inventory.
///
/// # Errors
/// As [`Client::call`].
pub(super) fn machine(client: &Client<'_>, reference: &Reference) -> Result<Option<Machine>> {
    const NAMES: [&str; 5] = [
        "name",
        "datastore",
        "runtime.powerState",
        "config.files.vmPathName",
        "config.hardware.device",
    ];
    let answer = match client.properties(std::slice::from_ref(reference), &NAMES) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        answer => answer?,
    };
    let document = answer.document()?;
    let found = objects(&document).next();
    Ok(found.map(|found| {
        let devices = found.value("config.hardware.device");
        let devices = devices.into_iter().flat_map(|all| all.children());
        // Only network cards have this.
        let cards = devices.filter(|device| child(*device, "macAddress").is_some());
        Machine {
            name: found.text("name"),
            path: found.text("config.files.vmPathName"),
            datastores: found.references("datastore"),
            is_on: found.text("runtime.powerState") != "poweredOff",
            cards: cards.map(disconnected).collect(),
            reference: found.reference,
        }
    }))
}

/// Parameters of `ReconfigVM_Task` that replace these network cards.
pub(super) fn card_changes(cards: &[String]) -> String {
    let change = |card| format!("<deviceChange><operation>edit</operation>{card}</deviceChange>");
    format!("<spec>{}</spec>", cards.iter().map(change).collect::<String>())
}

/// A network card as it is, with its cable pulled, also for the next power on.
fn disconnected(card: Node<'_, '_>) -> String {
    const PULLED: &str = "<connectable><startConnected>false</startConnected>\
                          <allowGuestControl>true</allowGuestControl>\
                          <connected>false</connected></connectable>";
    // The schema has an order.
    const BEFORE: [&str; 3] = ["key", "deviceInfo", "backing"];
    let (before, after): (Vec<_>, Vec<_>) = card
        .children()
        .filter(|part| part.is_element() && part.tag_name().name() != "connectable")
        .partition(|part| BEFORE.contains(&part.tag_name().name()));
    let copies = |parts: Vec<Node<'_, '_>>| parts.into_iter().map(copied).collect::<String>();
    let kind = escaped(type_of(card));
    format!("<device xsi:type=\"{kind}\">{}{PULLED}{}</device>", copies(before), copies(after))
}
