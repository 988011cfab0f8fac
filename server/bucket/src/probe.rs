//! Whether a store can do what a repository in it needs, before anything is stored there.

use coldrise_block::{Error, ErrorKind, Result};

use coldrise_objects::Objects;

const CONTENT: &[u8] = b"Coldrise looks whether this store can be used. Remove this object.";

/// Puts the object `name` below `folder`, where another one is, reads and lists it in all ways that are needed, and removes it.
/// Rights to remove it are not needed.
///
/// # Errors
/// `Unsupported` for a store that cannot be used; errors of reaching the store.
pub(super) fn probe(objects: &dyn Objects, folder: &str, name: &str) -> Result<()> {
    let probed = try_out(objects, folder, name);
    let removed = objects.delete_sign(name);
    probed?;
    if let Err(error) = removed {
        let what = "copies will work with these keys, but bucket prune and bucket forget will not";
        tracing::warn!("{what}: {}", error.full_message());
    }
    Ok(())
}

fn try_out(objects: &dyn Objects, folder: &str, name: &str) -> Result<()> {
    objects.put(name, CONTENT.to_vec())?;
    let length = CONTENT.len() as u64;
    // Readers ask for more than small objects have.
    let all = objects.get_range(name, 0, 2 * length)?;
    let is_same = objects.get(name, length)? == CONTENT
        && all == CONTENT
        && objects.get_range(name, 9, 5)? == CONTENT[9..14];
    if !is_same {
        return Err(unusable(objects, "a new object cannot be read back"));
    }
    let listed = objects.list_in_pages(folder, Some(1))?;
    if listed.len() < 2 {
        return Err(unusable(objects, "it lists only the first page"));
    }
    match listed.iter().find(|listed| listed.name == name) {
        Some(listed) if listed.size_bytes == length => Ok(()),
        _ => Err(unusable(objects, "a new object is missing from its listing")),
    }
}

/// The store lacks something.
pub(super) fn unusable(objects: &dyn Objects, why: &str) -> Error {
    let text = format!("{} cannot be used, because {why}", objects.place());
    Error::new(ErrorKind::Unsupported, text).advise("use another store")
}
