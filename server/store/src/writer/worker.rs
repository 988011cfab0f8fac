//! Workers: from plaintext to numbered, compressed, encrypted values.

use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;
use std::sync::Arc;

use coldrise_block::{Error, ErrorKind, Result};

use crate::chunk::{is_zero, ChunkId, EncoderState};
use crate::dedup::{self, ChunkHash};

use super::run::{HealedChunk, Job, NewChunk, Run, Step, WriteCounts};

/// Takes jobs until there are no more.
pub(super) fn work(run: &Run, steps: &Sender<(u64, Step)>) {
    let mut encoder = match run.shared.repository.codec().encoder() {
        Ok(encoder) => Some(encoder),
        Err(error) => {
            run.fail(error);
            None
        }
    };
    while let Some(job) = run.next_job() {
        let (turn, order) = (job.turn, job.order);
        let bytes = job.range.len() as u64;
        // A panic must not leave the others waiting for this job's turn.
        let step = match &mut encoder {
            Some(encoder) if !run.is_stopped() => {
                catch_unwind(AssertUnwindSafe(|| encode_job(run, encoder, &job)))
                    .unwrap_or_else(|_| Err(Error::new(ErrorKind::Internal, "a worker panicked")))
            }
            _ => Ok(Step::Nothing { bytes }),
        };
        let step = step.unwrap_or_else(|error| {
            run.fail(error);
            Step::Nothing { bytes }
        });
        pass_turn(run, turn);
        if let Some(buffer) = Arc::into_inner(job.bytes) {
            run.recycle_buffer(buffer);
        }
        // The committer ends only after all workers.
        let _ = steps.send((order, step));
    }
}

/// Ends the turn of a job, if that has not happened yet.
fn pass_turn(run: &Run, turn: u64) {
    let mut numbering = run.numbering.lock();
    while numbering.turn < turn {
        run.turn_changed.wait(&mut numbering);
    }
    if numbering.turn == turn {
        numbering.turn += 1;
        run.turn_changed.notify_all();
    }
}

struct Content {
    hash: ChunkHash,
    /// 0: not found in the dedup family.
    id: ChunkId,
    is_new: bool,
}

fn encode_job(run: &Run, encoder: &mut EncoderState, job: &Job) -> Result<Step> {
    let repository = &*run.shared.repository;
    let bytes = &job.bytes[job.range.clone()];
    let mut counts = WriteCounts::default();

    let mut tail = Vec::new();
    let mut contents = Vec::with_capacity(bytes.len() / run.chunk_size + 1);
    let mut chunks = Vec::with_capacity(bytes.len() / run.chunk_size + 1);
    for chunk in bytes.chunks(run.chunk_size) {
        if chunk.len() < run.chunk_size {
            // The end of the disk: the rest of its last chunk is zeroes.
            tail = chunk.to_vec();
            tail.resize(run.chunk_size, 0);
        }
    }
    for chunk in bytes.chunks(run.chunk_size) {
        let chunk = if chunk.len() < run.chunk_size { &tail[..] } else { chunk };
        chunks.push(chunk);
        contents.push(if is_zero(chunk) {
            counts.zero_chunks += 1;
            None
        } else {
            Some(Content { hash: dedup::hash_chunk(repository, chunk), id: 0, is_new: false })
        });
    }

    let seen_commits = run.commits.load(Ordering::Acquire);
    look_up(run, &mut contents)?;
    number(run, job.turn, seen_commits, &mut contents)?;

    let mut values = run.take_values();
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
            let sealer = &repository.keys().chunks;
            repository.codec().encode(encoder, sealer, content.id, chunk, &mut values)?;
            let value_end = values.len();
            new.push(NewChunk { id: content.id, hash: content.hash, value_end });
        } else {
            counts.known_chunks += 1;
            if run.shared.damaged.holds(&content.hash, content.id) {
                let mut value = Vec::new();
                let sealer = &repository.keys().chunks;
                repository.codec().encode(encoder, sealer, content.id, chunk, &mut value)?;
                healed.push(HealedChunk { id: content.id, hash: content.hash, value });
            }
        }
    }
    counts.healed_chunks = healed.len() as u64;
    counts.stored_chunks = new.len() as u64;
    counts.stored_bytes = values.len() as u64;
    run.count(&counts);
    let bytes = bytes.len() as u64;
    Ok(Step::Chunks { first_chunk: job.first_chunk, ids, new, values, healed, bytes })
}

fn look_up(run: &Run, contents: &mut [Option<Content>]) -> Result<()> {
    for content in contents.iter_mut().flatten().filter(|content| content.id == 0) {
        content.id = dedup::find(&run.shared.repository, &content.hash)?.unwrap_or(0);
    }
    Ok(())
}

/// Waits for the job's turn, so that ids ascend along the disk, and gives an
/// id to every content that has none.
fn number(run: &Run, turn: u64, seen_commits: u64, contents: &mut [Option<Content>]) -> Result<()> {
    let mut numbering = run.numbering.lock();
    while numbering.turn < turn {
        run.turn_changed.wait(&mut numbering);
    }
    // After two commits `fresh` may have forgotten what was committed after
    // the look-up. No commit ends while the lock is held.
    if run.commits.load(Ordering::Acquire) >= seen_commits + 2 {
        look_up(run, contents)?;
    }
    run.shared.referred.claim(contents.iter_mut().flatten().map(|content| &mut content.id));
    for content in contents.iter_mut().flatten().filter(|content| content.id == 0) {
        let next = numbering.next_chunk;
        content.id = *numbering.fresh.entry(content.hash).or_insert(next);
        if content.id == next {
            content.is_new = true;
            numbering.next_chunk = next
                .checked_add(1)
                .ok_or_else(|| Error::new(ErrorKind::Internal, "the chunk ids are used up"))?;
        }
    }
    numbering.turn += 1;
    run.turn_changed.notify_all();
    Ok(())
}
