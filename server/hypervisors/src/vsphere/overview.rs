//! The hosts and datastores of a server, for people who choose.

use std::net::IpAddr;
use std::time::Duration;

use coldrise_block::Result;
use serde::{Deserialize, Serialize};

use super::client::{Client, VsphereAccess};
use super::inventory;
use super::soap::objects;

/// Time limit of one request: a client waits for the answer.
const TIMEOUT: Duration = Duration::from_secs(15);

/// A server's answer to a login.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VsphereOverview {
    /// Product and version, in the server's words.
    pub product: String,
    /// A vCenter, and no single ESXi.
    pub is_vcenter: bool,
    /// The hosts, by name.
    pub hosts: Vec<ListedHost>,
    /// The datastores that hosts have, by name.
    pub datastores: Vec<ListedDatastore>,
}

/// A host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedHost {
    /// Its name in the inventory.
    pub name: String,
    /// It answers to vCenter.
    pub is_connected: bool,
    /// The addresses from which it reaches NFS servers.
    pub addresses: Vec<IpAddr>,
}

/// A datastore.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedDatastore {
    /// Its name in the inventory.
    pub name: String,
    /// Free space in bytes, if the server tells.
    pub free_bytes: Option<u64>,
}

/// Logs in, and lists what the server has. Changes nothing.
///
/// # Errors
/// As [`super::Vsphere::login`].
pub fn overview(access: &VsphereAccess) -> Result<VsphereOverview> {
    let client = Client::login(access, TIMEOUT, &|| false)?;
    let mut hosts: Vec<ListedHost> = inventory::hosts(&client)?
        .into_iter()
        .map(|host| ListedHost {
            name: host.name,
            is_connected: host.is_connected,
            addresses: host.addresses,
        })
        .collect();
    hosts.sort_by(|a, b| a.name.cmp(&b.name));
    let answer = client.all("Datastore", &["name", "summary.freeSpace"])?;
    let document = answer.document()?;
    let mut datastores: Vec<ListedDatastore> = objects(&document)
        .map(|found| ListedDatastore {
            name: found.text("name"),
            free_bytes: found.text("summary.freeSpace").parse().ok(),
        })
        .collect();
    datastores.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(VsphereOverview {
        product: client.product.clone(),
        is_vcenter: client.is_vcenter,
        hosts,
        datastores,
    })
}
