//! Known damage, found without reading any disk.

use std::sync::Arc;

use coldrise_block::Result;
use coldrise_session::damaged_sessions;
use coldrise_store::{CatalogDamage, MachineName, PointName, Repository};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Known damage.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DamageListing {
    /// Lost or unreadable points and sessions.
    pub damaged: Vec<Damage>,
    /// Chunks on the list of damaged ones. Each heals when a backup stores its content again.
    pub damaged_chunks: u64,
}

/// One damage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Damage {
    /// The name, as far as it is known: MACHINE/POINT or live/SESSION.
    pub what: String,
    /// The kind of damage, in words.
    pub reason: String,
    /// One sentence with the suggested command, if there is one.
    pub message: String,
    /// The command that makes the repository usable again, if the damage determines one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
}

impl Damage {
    fn new(damage: &CatalogDamage) -> Damage {
        Damage {
            what: damage.what.clone(),
            reason: damage.reason.clone(),
            message: damage.message(),
            command: damage.command(),
        }
    }
}

impl DamageListing {
    /// The damage of these parts, of the sessions, and the number of damaged chunks. Reads no disk:
    /// `verify` finds more.
    pub(crate) fn of_parts(
        repository: &Arc<Repository>,
        lost: &[(MachineName, PointName)],
        unreadable: &[CatalogDamage],
    ) -> Result<DamageListing> {
        let lost =
            lost.iter().map(|(machine, point)| repository.lost(format!("{machine}/{point}")));
        let mut damaged: Vec<_> = lost.chain(unreadable.iter().cloned()).collect();
        damaged.extend(damaged_sessions(repository)?);
        damaged.extend(repository.damaged_marks());
        Ok(DamageListing {
            damaged: damaged.iter().map(Damage::new).collect(),
            damaged_chunks: repository.damaged_chunk_count()?,
        })
    }
}
