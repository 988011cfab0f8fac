//! Requests about published sessions.

use clap::Args;
use coldrise_store::{Address, SessionName};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::value::{session, text};

/// Publish a point for writing.
#[derive(Clone, Debug, Args, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Publish {
    /// MACHINE/POINT.
    #[arg(value_name = "MACHINE/POINT", value_parser = text::<Address>)]
    pub address: String,

    /// Name of the session. Default: the machine's name and the first unused number.
    #[arg(long = "name", value_name = "SESSION", value_parser = text::<SessionName>)]
    pub session: Option<String>,
}

/// Make a restore point of what a session has captured.
#[derive(Clone, Debug, Args, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Seal {
    /// The session's name, or live/SESSION.
    #[arg(value_name = "SESSION", value_parser = session)]
    pub session: String,
}

/// End a session: seal it first, or discard what it has captured.
#[derive(Clone, Debug, Args, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Unpublish {
    /// The session's name, or live/SESSION.
    #[arg(value_name = "SESSION", value_parser = session)]
    pub session: String,

    /// Discard everything captured since the last seal.
    #[arg(long)]
    #[serde(default)]
    pub discard: bool,
}
