//! Reads beyond a file's end.

/// The part of `buffer` that a file of this length fills from an offset on. The rest is zeroed: the
/// reader may have seen a longer file.
pub(super) fn clamp(buffer: &mut [u8], offset_bytes: u64, length_bytes: u64) -> &mut [u8] {
    let left = length_bytes.saturating_sub(offset_bytes);
    let filled = usize::try_from(left).map_or(buffer.len(), |left| left.min(buffer.len()));
    let (part, rest) = buffer.split_at_mut(filled);
    rest.fill(0);
    part
}
