//! The result of a seal.

use coldrise_store::PointDocument;
use serde::{Deserialize, Serialize};

use crate::client_files::SkippedFile;

/// The result of a seal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SealReport {
    /// The restore point.
    pub point: PointDocument,
    /// Files of clients that the point lacks because they are too large.
    #[serde(default)]
    pub left_out: Vec<SkippedFile>,
}
