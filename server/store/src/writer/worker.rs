//! Workers: turn plaintext into numbered, compressed, encrypted values.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;

use coldrise_block::{Error, ErrorKind, Result};

use crate::chunk::{ChunkId, EncoderState, is_zero};
use crate::dedup::{self, ChunkHash};

use super::disk_run::WriteCounts;
use super::pipeline::{Chunks, HealedChunk, Job, NewChunk, Pipeline, Step};

/// Takes jobs until there are no more.
pub(super) fn work(pipeline: &Pipeline, steps: &Sender<(u64, Step)>) {
    let mut encoder = match pipeline.shared.repository.codec().encoder() {
        Ok(encoder) => Some(encoder),
        Err(error) => {
            pipeline.fail(&error);
            None
        }
    };
    while let Some(job) = pipeline.next_job() {
        let bytes = job.range.len() as u64;
        let is_wanted = !job.disk.is_stopped() && !pipeline.is_failed();
        // A panic must not leave the others waiting for this job's turn.
        let encoded = match &mut encoder {
            Some(encoder) if is_wanted => {
                catch_unwind(AssertUnwindSafe(|| encode_job(pipeline, encoder, &job)))
                    .unwrap_or_else(|_| Err(Error::new(ErrorKind::Internal, "a worker panicked")))
                    .map(Step::Chunks)
            }
            _ => Ok(Step::Nothing { bytes }),
        };
        let was_numbered = pass_turn(pipeline, job.turn);
        let step = encoded.unwrap_or_else(|error| {
            if was_numbered {
                pipeline.fail(&error)
            } else {
                job.disk.fail(error)
            }
            Step::Nothing { bytes }
        });
        if let Some(buffer) = Arc::into_inner(job.bytes) {
            pipeline.recycle_buffer(buffer);
        }
        // The committer ends only after all workers.
        let _ = steps.send((job.order, step));
    }
}

/// Ends the turn of a job unless it has already ended; returns true if it had.
fn pass_turn(pipeline: &Pipeline, turn: u64) -> bool {
    let mut numbering = pipeline.numbering.lock();
    while numbering.turn < turn {
        pipeline.turn_changed.wait(&mut numbering);
    }
    let was_numbered = numbering.turn > turn;
    if !was_numbered {
        numbering.turn += 1;
        pipeline.turn_changed.notify_all();
    }
    was_numbered
}
struct Content {
    hash: ChunkHash,
    /// 0: not found in the dedup family.
    id: ChunkId,
    is_new: bool,
}

fn encode_job(pipeline: &Pipeline, encoder: &mut EncoderState, job: &Job) -> Result<Chunks> {
    let repository = &*pipeline.shared.repository;
    let bytes = &job.bytes[job.range.clone()];
    let mut counts = WriteCounts::default();

    let mut tail = Vec::new();
    let mut contents = Vec::with_capacity(bytes.len() / pipeline.chunk_size + 1);
    let mut chunks = Vec::with_capacity(bytes.len() / pipeline.chunk_size + 1);
    for chunk in bytes.chunks(pipeline.chunk_size) {
        if chunk.len() < pipeline.chunk_size {
            // At the end of the disk, the rest of the last chunk is zeroes.
            tail = chunk.to_vec();
            tail.resize(pipeline.chunk_size, 0);
        }
    }
    for chunk in bytes.chunks(pipeline.chunk_size) {
        let chunk = if chunk.len() < pipeline.chunk_size { &tail[..] } else { chunk };
        chunks.push(chunk);
        contents.push(if is_zero(chunk) {
            counts.zero_chunks += 1;
            None
        } else {
            Some(Content { hash: dedup::hash_chunk(repository, chunk), id: 0, is_new: false })
        });
    }

    let seen_commits = pipeline.commits.load(Ordering::Acquire);
    look_up(pipeline, &mut contents)?;
    number(pipeline, job.turn, seen_commits, &mut contents)?;

    let mut values = pipeline.take_values();
    let mut ids = Vec::with_capacity(contents.len());
    let mut new = Vec::new();
    let mut healed = Vec::new();
    for (chunk, content) in chunks.iter().zip(&contents) {
        let Some(content) = content else {
            ids.push(0);
            continue;
        };
        ids.push(content.id);
        if content.is_new {
            let aead = &repository.keys().chunks;
            repository.codec().encode(encoder, aead, content.id, chunk, &mut values)?;
            let value_end = values.len();
            new.push(NewChunk { id: content.id, hash: content.hash, value_end });
        } else {
            counts.known_chunks += 1;
            if pipeline.shared.damaged.holds(&content.hash, content.id) {
                let mut value = Vec::new();
                let aead = &repository.keys().chunks;
                repository.codec().encode(encoder, aead, content.id, chunk, &mut value)?;
                healed.push(HealedChunk { id: content.id, hash: content.hash, value });
            }
        }
    }
    counts.healed_chunks = healed.len() as u64;
    counts.stored_chunks = new.len() as u64;
    counts.stored_bytes = values.len() as u64;
    job.disk.count(&counts);
    let bytes = bytes.len() as u64;
    let (disk, first_chunk) = (Arc::clone(&job.disk), job.first_chunk);
    Ok(Chunks { disk, first_chunk, ids, new, values, healed, bytes })
}

fn look_up(pipeline: &Pipeline, contents: &mut [Option<Content>]) -> Result<()> {
    for content in contents.iter_mut().flatten().filter(|content| content.id == 0) {
        content.id = dedup::find(&pipeline.shared.repository, &content.hash)?.unwrap_or(0);
    }
    Ok(())
}

/// Waits for the job's turn, so that ids ascend along the disk, and gives an id to every content
/// without one. An error leaves the turn unchanged.
fn number(
    pipeline: &Pipeline,
    turn: u64,
    seen_commits: u64,
    contents: &mut [Option<Content>],
) -> Result<()> {
    let mut numbering = pipeline.numbering.lock();
    while numbering.turn < turn {
        pipeline.turn_changed.wait(&mut numbering);
    }
    // After two commits, `fresh` may no longer have contents that were committed after the look-up.
    // No commit ends while the lock is held.
    if pipeline.commits.load(Ordering::Acquire) >= seen_commits + 2 {
        look_up(pipeline, contents)?;
    }
    if numbering.next_chunk.checked_add(contents.len() as u64).is_none() {
        return Err(Error::new(ErrorKind::Internal, "the chunk ids are used up"));
    }
    pipeline.shared.referred.claim(contents.iter_mut().flatten().map(|content| &mut content.id));
    for content in contents.iter_mut().flatten().filter(|content| content.id == 0) {
        let next = numbering.next_chunk;
        content.id = *numbering.fresh.entry(content.hash).or_insert(next);
        if content.id == next {
            content.is_new = true;
            numbering.next_chunk = next + 1;
        }
    }
    numbering.turn += 1;
    pipeline.turn_changed.notify_all();
    Ok(())
}
