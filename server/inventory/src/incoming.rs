//! Points that are still on their way to the repository.

use coldrise_block::Result;
use coldrise_session::IncomingPoint;
use coldrise_store::{MachineName, PointSelector, Repository};
use serde::{Deserialize, Serialize};

/// A point on its way from another site: it can be booted before all of it is here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = ComingDetails)]
pub struct IncomingDetails {
    /// MACHINE/POINT, as it will be.
    pub address: String,
    /// The name of its machine here.
    pub machine: String,
    /// When the backup was made at the other site, in milliseconds since 1970.
    pub created_at_ms: u64,
    /// The sum of the sizes of its disks.
    pub size_bytes: u64,
    /// What has not arrived yet. Parts that were fetched out of turn count as missing.
    pub missing_bytes: u64,
    /// 100 only for all of it.
    pub percent_here: u64,
    /// The other site is connected: missing parts are fetched when they are read. If not, reading them gives I/O errors.
    pub is_reachable: bool,
    /// The names of its disks.
    pub disks: Vec<String>,
    /// Their sizes, in the same order.
    pub disk_sizes_bytes: Vec<u64>,
}

impl IncomingDetails {
    /// Describes one point.
    pub fn new(repository: &Repository, incoming: &IncomingPoint) -> IncomingDetails {
        let document = &incoming.point.document;
        IncomingDetails {
            address: format!("{}/{}", document.machine, document.point),
            machine: document.machine.to_string(),
            created_at_ms: document.created_at_ms,
            size_bytes: incoming.size_bytes(),
            missing_bytes: incoming.missing_bytes(),
            percent_here: incoming.percent_here(),
            is_reachable: incoming.is_reachable(repository),
            disks: document.disks.iter().map(|disk| disk.name.to_string()).collect(),
            disk_sizes_bytes: document.disks.iter().map(|disk| disk.size_bytes).collect(),
        }
    }

    /// What a selector means among `all`, which are sorted: the newest of the machine for `latest`, as with
    /// [`IncomingPoint::find`].
    pub fn find<'a>(
        all: &'a [IncomingDetails],
        machine: &MachineName,
        selector: &PointSelector,
    ) -> Option<&'a IncomingDetails> {
        let address = format!("{machine}/{selector}");
        let mut of_machine = all.iter().filter(|one| one.machine == machine.as_str());
        match selector {
            PointSelector::Exact(_) => of_machine.find(|one| one.address == address),
            PointSelector::Latest(0) => of_machine.next_back(),
            PointSelector::Latest(_) => None,
        }
    }

    /// Those of one machine, or of all.
    ///
    /// # Errors
    /// As for [`IncomingPoint::all`].
    pub fn all(
        repository: &Repository,
        machine: Option<&MachineName>,
    ) -> Result<Vec<IncomingDetails>> {
        let all = IncomingPoint::all(repository)?;
        let is_meant = |incoming: &&IncomingPoint| {
            machine.is_none_or(|name| incoming.partial.machine == *name)
        };
        Ok(all.iter().filter(is_meant).map(|one| IncomingDetails::new(repository, one)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn details(machine: &str, point: &str) -> IncomingDetails {
        IncomingDetails {
            address: format!("{machine}/{point}"),
            machine: machine.to_owned(),
            created_at_ms: 0,
            size_bytes: 0,
            missing_bytes: 0,
            percent_here: 0,
            is_reachable: false,
            disks: Vec::new(),
            disk_sizes_bytes: Vec::new(),
        }
    }

    #[test]
    fn latest_is_the_newest_of_the_machine() {
        let all = [
            details("web01", "20261101T100000Z"),
            details("web01", "20261102T100000Z"),
            details("web02", "20261103T100000Z"),
        ];
        let found = |machine: &str, selector: &str| {
            let selector = PointSelector::parse(selector).unwrap();
            let found = IncomingDetails::find(&all, &machine.parse().unwrap(), &selector);
            found.map(|one| one.address.as_str())
        };
        assert_eq!(found("web01", "latest"), Some("web01/20261102T100000Z"));
        assert_eq!(found("web01", "20261101T100000Z"), Some("web01/20261101T100000Z"));
        assert_eq!(found("web01", "20261103T100000Z"), None);
        assert_eq!((found("web01", "latest~1"), found("web03", "latest")), (None, None));
    }
}
