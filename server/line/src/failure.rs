//! Why a line ended: said again by each later call.

use coldrise_block::{Error, ErrorKind};

/// The end of a line.
#[derive(Clone, Debug)]
pub(crate) enum End {
    /// The peer closed it in order.
    ClosedByPeer,
    /// This side closed it.
    Closed,
    /// It failed.
    Failed(Failure),
}

/// A failure, as often as it is asked for.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) kind: ErrorKind,
    pub(crate) text: String,
    pub(crate) advice: &'static str,
}

impl Failure {
    /// A peer that does not keep to the protocol.
    pub(crate) fn protocol(text: impl Into<String>) -> Failure {
        let text = format!("the peer broke the protocol: {}", text.into());
        let advice = "run the same version of Coldrise at both ends";
        Failure { kind: ErrorKind::Corrupt, text, advice }
    }

    pub(crate) fn error(&self, peer: &str) -> Error {
        Error::new(self.kind, format!("the line to {peer}: {}", self.text)).advise(self.advice)
    }
}

impl End {
    /// The error of sending over a line that has ended.
    pub(crate) fn error(&self, peer: &str) -> Error {
        let text = match self {
            End::Failed(failure) => return failure.error(peer),
            End::Closed => "is closed",
            End::ClosedByPeer => "was closed by the other side",
        };
        Error::new(ErrorKind::Io, format!("the line to {peer} {text}"))
    }
}
