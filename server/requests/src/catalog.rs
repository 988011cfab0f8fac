//! Requests that change which points there are, and which are served.

use clap::Args;
use coldrise_inventory::Retention;
use coldrise_store::MachineName;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::value::{point, text};

/// Restore points.
#[derive(Clone, Debug, Args, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Addresses {
    /// The restore points. For quarantine and release, `latest` counts quarantined points too, so that both and a
    /// repeated command mean the same point.
    #[arg(value_name = "MACHINE/POINT", required = true, value_parser = point)]
    #[schema(min_items = 1, max_items = 1000)]
    pub addresses: Vec<String>,
}

/// Remove points by rules. A point stays if at least one rule keeps it.
#[derive(Clone, Debug, Args, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Prune {
    /// Prune only these machines. Default: all machines. The rules apply to each machine separately.
    #[arg(value_name = "MACHINE", value_parser = text::<MachineName>)]
    #[serde(default)]
    pub machines: Vec<String>,

    /// The rules.
    #[command(flatten)]
    pub rules: Retention,
}
