//! Changes of the service's settings: users, tokens, targets of messages.

use coldrise_block::Result;

use super::problem::{Answer, blocking};
use crate::access::{Identity, Permission};
use crate::events::What;
use crate::service::{Service, SharedService};

/// Makes a change for an administrator of all machines, and tells clients of it.
///
/// # Errors
/// `Forbidden` for other callers; those of the change.
pub(super) async fn change<T: Send + 'static>(
    service: SharedService,
    caller: &Identity,
    change: impl FnOnce(&Service) -> Result<T> + Send + 'static,
) -> Answer<T> {
    caller.allow_all(Permission::Administer)?;
    blocking(move || {
        let changed = change(&service)?;
        service.events.send(What::Settings);
        Ok(changed)
    })
    .await
}
