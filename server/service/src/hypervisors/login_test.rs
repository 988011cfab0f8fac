//! A login on trial, which also finds what can be chosen.

use coldrise_block::Result;
use coldrise_hypervisors::vsphere::{VsphereOverview, overview};
use serde::{Deserialize, Serialize};

use super::{Hypervisor, HypervisorKind};
use crate::clock::now_ms;
use crate::service::Service;

/// How a test ended.
#[derive(Clone, Serialize, utoipa::ToSchema)]
pub(crate) struct TestResult {
    /// Milliseconds since 1970.
    pub(crate) at_ms: i64,
    pub(crate) is_ok: bool,
    /// What happened.
    pub(crate) text: String,
}

/// What a server has.
#[derive(Clone, Serialize, Deserialize, utoipa::ToSchema)]
pub(crate) struct Found {
    /// Product and version, in the server's words.
    product: String,
    /// The hosts, by name.
    hosts: Vec<FoundHost>,
    /// The datastores, by name.
    datastores: Vec<FoundDatastore>,
}

/// A host that can run machines.
#[derive(Clone, Serialize, Deserialize, utoipa::ToSchema)]
pub(crate) struct FoundHost {
    /// As in the inventory.
    name: String,
    /// It answers to vCenter.
    is_connected: bool,
}

/// A datastore that machines can move to.
#[derive(Clone, Serialize, Deserialize, utoipa::ToSchema)]
pub(crate) struct FoundDatastore {
    /// As in the inventory.
    name: String,
    free_bytes: Option<u64>,
}

impl From<VsphereOverview> for Found {
    fn from(overview: VsphereOverview) -> Found {
        let hosts = overview.hosts.into_iter();
        // Ours: they hold sessions.
        let datastores =
            overview.datastores.into_iter().filter(|one| !one.name.starts_with("coldrise-"));
        Found {
            product: overview.product,
            hosts: hosts
                .map(|host| FoundHost { name: host.name, is_connected: host.is_connected })
                .collect(),
            datastores: datastores
                .map(|one| FoundDatastore { name: one.name, free_bytes: one.free_bytes })
                .collect(),
        }
    }
}

/// Logs in, lists hosts and datastores, and records the result.
///
/// # Errors
/// `NotFound` if there is no such server; errors of the database.
pub(crate) fn test(service: &Service, name: &str) -> Result<Hypervisor> {
    let wanted = service.database.hypervisor(name)?;
    let tried = wanted.access(&service.options).and_then(|access| overview(&access));
    let (is_ok, text, found) = match tried {
        Err(error) => (false, error.full_message(), None),
        Ok(seen) if seen.is_vcenter != (wanted.settings.kind == HypervisorKind::Vcenter) => {
            let is = if seen.is_vcenter { "a vCenter" } else { "a single ESXi" };
            (false, format!("{} is {is}: change the kind", seen.product), None)
        }
        Ok(seen) => {
            let found = Found::from(seen);
            let (hosts, datastores) = (found.hosts.len(), found.datastores.len());
            let text = format!("{}, hosts: {hosts}, datastores: {datastores}", found.product);
            (true, text, Some(found))
        }
    };
    let result = TestResult { at_ms: now_ms(), is_ok, text };
    service.database.note_test(name, &result, found.as_ref())?;
    service.database.hypervisor(name)
}
