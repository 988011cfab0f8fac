//! Writes fields into fixed headers.

/// Writes `field` at `offset`. The offsets are constants of a format and lie
/// within the header by construction.
pub(crate) fn put(header: &mut [u8], offset: usize, field: impl AsRef<[u8]>) {
    let field = field.as_ref();
    header[offset..offset + field.len()].copy_from_slice(field);
}
