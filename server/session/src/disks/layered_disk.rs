//! The disk view: a chunk map below, layers above, one byte-addressable disk.

use std::sync::Arc;

use coldrise_block::{
    BLOCK_SIZE_BYTES, Disk, Error, ErrorKind, Extent, ExtentKind, ReadContext, ReadSource, Result,
    Waiting, check_range, push_extent,
};
use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::layer::{Layer, Lookup, ReadOptions, STRIPE_BLOCKS, Stripe};

const BLOCK: usize = BLOCK_SIZE_BYTES as usize;
const STRIPE_BYTES: u64 = STRIPE_BLOCKS * BLOCK_SIZE_BYTES;

/// The parts of a disk view. Writes go to the last layer.
pub(crate) struct Stack {
    pub(crate) base: Arc<dyn Disk>,
    pub(crate) layers: Vec<Arc<Layer>>,
}

/// A disk of a session (writable) or of a synthetic restore point (read-only).
///
/// A write of whole blocks goes directly to the top layer. For a partial write, the whole block is
/// read, changed and captured under the lock of its stripe.
pub(crate) struct LayeredDisk {
    size_bytes: u64,
    is_read_only: bool,
    /// Whether a write fails for lack of space, instead of taking the space of time marks.
    keeps_marks: bool,
    /// Every request shares it. A seal, which swaps the top, and a rebase lock it exclusively.
    stack: RwLock<Stack>,
}

impl LayeredDisk {
    pub(crate) fn new(size_bytes: u64, is_read_only: bool, stack: Stack) -> Self {
        LayeredDisk { size_bytes, is_read_only, keeps_marks: false, stack: RwLock::new(stack) }
    }

    /// A disk that no guest writes, so that a write need not succeed: time marks are kept.
    pub(crate) fn keeping_marks(self, keeps_marks: bool) -> Self {
        LayeredDisk { keeps_marks, ..self }
    }

    /// Repeats a write for which there is no space without the space of time marks: the guest's writes
    /// come first.
    fn retry_without_marks(&self, layer: &Layer, write: impl Fn() -> Result<()>) -> Result<()> {
        match write() {
            Err(error) if error.kind() == ErrorKind::NoSpace && !self.keeps_marks => {
                let is_freed = layer.remove_all_time_marks().unwrap_or(false);
                if is_freed { write() } else { Err(error) }
            }
            written => written,
        }
    }

    /// Blocks all requests until the guard is dropped.
    pub(crate) fn pause(&self) -> RwLockWriteGuard<'_, Stack> {
        self.stack.write()
    }

    /// Keeps the layers from being replaced until the guard is dropped.
    pub(crate) fn hold(&self) -> RwLockReadGuard<'_, Stack> {
        self.stack.read()
    }

    /// False once another process has changed a layer.
    pub(crate) fn is_current(&self) -> bool {
        self.stack.read().layers.iter().all(|layer| layer.is_current())
    }

    /// True if there are no layers: all reads go to the base.
    pub(crate) fn is_bare(&self) -> bool {
        self.stack.read().layers.is_empty()
    }

    /// The highest layer.
    pub(crate) fn top(&self) -> Option<Arc<Layer>> {
        self.stack.read().layers.last().map(Arc::clone)
    }

    /// True if the top layer is read through another process's block map.
    pub(crate) fn is_attached(&self) -> bool {
        self.stack.read().layers.last().is_some_and(|layer| layer.is_attached())
    }

    fn check_writable(&self) -> Result<()> {
        if self.is_read_only {
            return Err(Error::new(
                ErrorKind::ReadOnly,
                "a restore point never changes; publish it as a session to write",
            ));
        }
        Ok(())
    }

    /// Captures the part of a write that lies in one stripe.
    fn write_in_stripe(&self, stack: &Stack, bytes: &[u8], offset_bytes: u64) -> Result<()> {
        let layer = top(stack)?;
        self.retry_without_marks(layer, || self.capture_in_stripe(stack, bytes, offset_bytes))
    }

    fn capture_in_stripe(&self, stack: &Stack, bytes: &[u8], offset_bytes: u64) -> Result<()> {
        let layer = top(stack)?;
        let first = offset_bytes / BLOCK_SIZE_BYTES;
        let head = (offset_bytes % BLOCK_SIZE_BYTES) as usize;
        let guard = layer.lock_stripe(first)?;
        if head == 0 && bytes.len() % BLOCK == 0 {
            return layer.capture(&guard, first, bytes);
        }
        let mut whole = vec![0; (head + bytes.len()).next_multiple_of(BLOCK)];
        let end = whole.len();
        let tail = head + bytes.len();
        if head != 0 {
            self.read_block(stack, first, &mut whole[..BLOCK])?;
        }
        if tail % BLOCK != 0 && (head == 0 || end > BLOCK) {
            let last = first + (end / BLOCK) as u64 - 1;
            self.read_block(stack, last, &mut whole[end - BLOCK..])?;
        }
        whole[head..tail].copy_from_slice(bytes);
        layer.capture(&guard, first, &whole)
    }

    /// Reads one whole block. Bytes beyond the disk's end are zeroes.
    fn read_block(&self, stack: &Stack, block: u64, out: &mut [u8]) -> Result<()> {
        let offset_bytes = block * BLOCK_SIZE_BYTES;
        let inside = (self.size_bytes - offset_bytes).min(BLOCK_SIZE_BYTES) as usize;
        out[inside..].fill(0);
        let context = &mut ReadContext::new(Waiting::Allowed);
        let (level, out) = (stack.layers.len(), &mut out[..inside]);
        read_through(stack, level, out, offset_bytes, Stripe::Held, context)
    }
}

fn no_extents() -> Error {
    Error::new(ErrorKind::Internal, "disk returned no extents")
}

fn top(stack: &Stack) -> Result<&Layer> {
    let missing = || Error::new(ErrorKind::Internal, "a writable disk without a layer");
    stack.layers.last().map(|layer| &**layer).ok_or_else(missing)
}

/// Reads through the lowest `level` layers and the base. `stripe` is that of the highest of these
/// layers.
fn read_through(
    stack: &Stack,
    level: usize,
    out: &mut [u8],
    offset_bytes: u64,
    stripe: Stripe,
    context: &mut ReadContext,
) -> Result<()> {
    let Some(layer) = level.checked_sub(1).and_then(|i| stack.layers.get(i)) else {
        return stack.base.read(out, offset_bytes, context);
    };
    let how = ReadOptions { stripe, waiting: context.waiting() };
    let mut done = 0;
    while done < out.len() {
        let at = offset_bytes + done as u64;
        let block = at / BLOCK_SIZE_BYTES;
        let head = (at % BLOCK_SIZE_BYTES) as usize;
        let rest = out.len() - done;
        let blocks_left = ((head + rest) as u64).div_ceil(BLOCK_SIZE_BYTES);
        let found = layer.lookup(block);
        if let Lookup::Slot(slot) = found {
            context.start_clock();
            let length = read_captured(layer, block, slot, head, &mut out[done..], how)?;
            context.add(ReadSource::Captured, at, length as u64);
            done += length;
            continue;
        }
        let mut blocks = layer.uniform_blocks(block, blocks_left);
        while blocks < blocks_left && layer.lookup(block + blocks) == found {
            blocks += layer.uniform_blocks(block + blocks, blocks_left - blocks);
        }
        let length = ((blocks * BLOCK_SIZE_BYTES) as usize - head).min(rest);
        let piece = &mut out[done..done + length];
        match found {
            Lookup::Zero => {
                piece.fill(0);
                context.add(ReadSource::Zero, at, length as u64);
            }
            _ => read_through(stack, level - 1, piece, at, Stripe::Free, context)?,
        }
        done += length;
    }
    Ok(())
}

/// Reads captured bytes from `head` of `block` on. Returns their number; 0 means: look up again.
fn read_captured(
    layer: &Layer,
    block: u64,
    slot: u32,
    head: usize,
    out: &mut [u8],
    how: ReadOptions,
) -> Result<usize> {
    let whole_blocks = out.len() / BLOCK;
    if head == 0 && whole_blocks > 0 {
        let run = layer.slot_run(block, slot, whole_blocks as u64) as usize;
        return Ok(layer.read_slots(block, slot, &mut out[..run * BLOCK], how)? * BLOCK);
    }
    let mut whole = [0; BLOCK];
    if layer.read_slots(block, slot, &mut whole, how)? == 0 {
        return Ok(0);
    }
    let length = (BLOCK - head).min(out.len());
    out[..length].copy_from_slice(&whole[head..head + length]);
    Ok(length)
}

fn extents_through(
    stack: &Stack,
    level: usize,
    offset_bytes: u64,
    length_bytes: u64,
    limit: usize,
    extents: &mut Vec<Extent>,
) -> Result<()> {
    let Some(layer) = level.checked_sub(1).and_then(|i| stack.layers.get(i)) else {
        for extent in stack.base.extents(offset_bytes, length_bytes, limit)? {
            push_extent(extents, extent);
        }
        return Ok(());
    };
    let end = offset_bytes + length_bytes;
    let mut at = offset_bytes;
    while at < end && extents.len() <= limit {
        let block = at / BLOCK_SIZE_BYTES;
        let blocks_left = end.div_ceil(BLOCK_SIZE_BYTES) - block;
        let found = layer.lookup(block);
        let is_same = |other: Lookup| match found {
            Lookup::Slot(_) => matches!(other, Lookup::Slot(_)),
            _ => other == found,
        };
        let mut blocks = layer.uniform_blocks(block, blocks_left);
        while blocks < blocks_left && is_same(layer.lookup(block + blocks)) {
            blocks += layer.uniform_blocks(block + blocks, blocks_left - blocks);
        }
        let stop = ((block + blocks) * BLOCK_SIZE_BYTES).min(end);
        let kind = match found {
            Lookup::Slot(_) => ExtentKind::Stored,
            Lookup::Zero => ExtentKind::Zero,
            Lookup::Below => {
                extents_through(stack, level - 1, at, stop - at, limit, extents)?;
                let last = extents.last();
                at = last.map_or_else(|| Err(no_extents()), |extent| extent.end_behind(at))?;
                continue;
            }
        };
        push_extent(extents, Extent { offset_bytes: at, length_bytes: stop - at, kind });
        at = stop;
    }
    Ok(())
}

impl Disk for LayeredDisk {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn is_read_only(&self) -> bool {
        self.is_read_only
    }

    fn read(&self, buffer: &mut [u8], offset_bytes: u64, context: &mut ReadContext) -> Result<()> {
        check_range(self.size_bytes, offset_bytes, buffer.len() as u64)?;
        let stack = match self.stack.try_read() {
            Some(stack) => stack,
            // A seal holds the lock for a short time only.
            None => {
                context.begin_wait()?;
                self.stack.read()
            }
        };
        read_through(&stack, stack.layers.len(), buffer, offset_bytes, Stripe::Free, context)
    }

    fn write_at(&self, bytes: &[u8], offset_bytes: u64) -> Result<()> {
        self.check_writable()?;
        check_range(self.size_bytes, offset_bytes, bytes.len() as u64)?;
        let stack = self.stack.read();
        let mut done = 0;
        while done < bytes.len() {
            let at = offset_bytes + done as u64;
            let in_stripe = STRIPE_BYTES - at % STRIPE_BYTES;
            let length = (bytes.len() - done).min(in_stripe as usize);
            self.write_in_stripe(&stack, &bytes[done..done + length], at)?;
            done += length;
        }
        Ok(())
    }

    fn write_zeroes(&self, offset_bytes: u64, length_bytes: u64) -> Result<()> {
        self.check_writable()?;
        check_range(self.size_bytes, offset_bytes, length_bytes)?;
        let stack = self.stack.read();
        let end = offset_bytes + length_bytes;
        // A last block that the disk's end cuts short counts as whole.
        let is_at_end = end == self.size_bytes;
        let first_whole = offset_bytes.next_multiple_of(BLOCK_SIZE_BYTES);
        let end_whole = if is_at_end {
            end.next_multiple_of(BLOCK_SIZE_BYTES)
        } else {
            end - end % BLOCK_SIZE_BYTES
        };
        if first_whole >= end_whole {
            return self.write_zero_bytes(&stack, offset_bytes, end);
        }
        self.write_zero_bytes(&stack, offset_bytes, first_whole)?;
        self.write_zero_bytes(&stack, end_whole.min(end), end)?;
        let first = first_whole / BLOCK_SIZE_BYTES;
        let layer = top(&stack)?;
        let count = end_whole / BLOCK_SIZE_BYTES - first;
        self.retry_without_marks(layer, || layer.capture_zeroes(first, count))
    }

    fn trim(&self, offset_bytes: u64, length_bytes: u64) -> Result<()> {
        self.check_writable()?;
        check_range(self.size_bytes, offset_bytes, length_bytes)?;
        let end = offset_bytes + length_bytes;
        let first = offset_bytes.div_ceil(BLOCK_SIZE_BYTES);
        let last = if end == self.size_bytes {
            end.div_ceil(BLOCK_SIZE_BYTES)
        } else {
            end / BLOCK_SIZE_BYTES
        };
        if first >= last {
            return Ok(());
        }
        let stack = self.stack.read();
        let layer = top(&stack)?;
        self.retry_without_marks(layer, || layer.capture_zeroes(first, last - first))
    }

    fn flush(&self) -> Result<()> {
        if self.is_read_only {
            return Ok(());
        }
        // Flush without the lock: otherwise a seal would wait for the flush, and readers for the
        // seal.
        let layer = self.stack.read().layers.last().map(Arc::clone);
        layer.map_or(Ok(()), |layer| layer.flush())
    }

    fn extents(&self, offset_bytes: u64, length_bytes: u64, limit: usize) -> Result<Vec<Extent>> {
        check_range(self.size_bytes, offset_bytes, length_bytes)?;
        let stack = self.stack.read();
        let mut extents = Vec::new();
        extents_through(
            &stack,
            stack.layers.len(),
            offset_bytes,
            length_bytes,
            limit.max(1),
            &mut extents,
        )?;
        Ok(extents)
    }
}

impl LayeredDisk {
    /// Zeroes a few bytes inside blocks.
    fn write_zero_bytes(&self, stack: &Stack, from: u64, to: u64) -> Result<()> {
        let zeroes = [0; BLOCK];
        let mut at = from;
        while at < to {
            let length = (to - at).min(BLOCK_SIZE_BYTES - at % BLOCK_SIZE_BYTES);
            self.write_in_stripe(stack, &zeroes[..length as usize], at)?;
            at += length;
        }
        Ok(())
    }
}
