//! What is asked of the source, and what becomes of its answers.

use super::*;

const CHUNK: u64 = 4096;

fn fetches() -> Arc<Fetches> {
    let fetches = Arc::new(Fetches::default());
    let differences = ByteRanges::union(vec![(0, 64 * CHUNK)]);
    let disk = FetchedDisk { size_bytes: 100 * CHUNK - 96, end_bytes: 0, differences };
    fetches.begin(7, CHUNK, vec![disk]);
    fetches
}

/// Fetches in a thread of its own, which `source` answers.
fn with_source(
    offset: u64,
    length: u64,
    source: impl FnOnce(&Fetches),
    fetches: &Arc<Fetches>,
) -> Result<Vec<u8>> {
    std::thread::scope(|scope| {
        let fetched = scope.spawn(|| fetches.fetch(7, 0, offset, length));
        source(fetches);
        fetched.join().unwrap()
    })
}

fn data(id: u32, status: u8, rest: &[u8]) -> Frame {
    let mut body = id.to_le_bytes().to_vec();
    body.push(status);
    body.extend_from_slice(rest);
    Frame { stream: 0, kind: DATA, body }
}

fn content(ask: ReadAsk, byte: u8) -> Frame {
    let plain = vec![byte; ask.length_bytes as usize];
    data(ask.id, READ_CONTENT, &zstd::bulk::compress(&plain, 1).unwrap())
}

/// The next read that begins there; others are left out.
fn asked(fetches: &Fetches, offset_bytes: u64) -> ReadAsk {
    loop {
        let ask = fetches.next_read().unwrap();
        if ask.offset_bytes == offset_bytes {
            return ask;
        }
    }
}

#[test]
fn a_piece_is_requested_once_and_the_rest_is_read_ahead() {
    let fetches = fetches();
    // The rest of what differs is read ahead, in one read.
    let answer = |fetches: &Fetches| {
        let (first, ahead) = (fetches.next_read().unwrap(), fetches.next_read().unwrap());
        assert_eq!((first.number, first.offset_bytes, first.length_bytes), (7, 0, 4096));
        assert_eq!((ahead.offset_bytes, ahead.length_bytes), (4096, 63 * 4096));
        fetches.take(&content(first, 6)).unwrap();
        fetches.take(&content(ahead, 7)).unwrap();
    };
    assert_eq!(with_source(0, CHUNK, answer, &fetches).unwrap(), vec![6; 4096]);
    // All of it is in memory now, and waits to be noted.
    assert_eq!(fetches.fetch(7, 0, 8192, 8192).unwrap(), vec![7; 8192]);
    assert_eq!(fetches.unnoted_bytes(), 64 * CHUNK);
    assert_eq!(*fetches.piece(0, 0).unwrap(), vec![6; 4096]);
    let pieces = fetches.take_unnoted();
    let offsets: Vec<_> = pieces.iter().map(|piece| piece.offset_bytes / CHUNK).collect();
    assert_eq!(offsets, (0..64).collect::<Vec<_>>());
    // It stays until the second note.
    assert_eq!((fetches.unnoted_bytes(), fetches.take_unnoted().len()), (0, 0));
    assert!(fetches.piece(0, 0).is_some());
    fetches.take_unnoted();
    assert!(fetches.piece(0, 0).is_none());
}

#[test]
fn reads_in_order_are_read_further_ahead() {
    const READ: u64 = 8 * CHUNK;
    let fetches = fetches();
    let differences = ByteRanges::union(vec![(0, 4096 * CHUNK)]);
    let disk = FetchedDisk { size_bytes: 4096 * CHUNK, end_bytes: 0, differences };
    fetches.begin(7, CHUNK, vec![disk]);
    let mut known = 0;
    let mut read = |offset: u64| {
        let answer = |fetches: &Fetches| {
            // What is known is not asked for again, and no read is longer than 256 KiB.
            while !fetches.state.lock().outgoing.is_empty() || known < offset + READ {
                let ask = fetches.next_read().unwrap();
                assert!(
                    ask.length_bytes <= MAX_READ_BYTES && ask.offset_bytes >= known.min(offset)
                );
                known = known.max(ask.offset_bytes + u64::from(ask.length_bytes));
                fetches.take(&content(ask, 1)).unwrap();
            }
        };
        with_source(offset, READ, answer, &fetches).unwrap();
        known - (offset + READ)
    };
    let ahead: Vec<u64> = (0..12).map(|number| read(number * READ)).collect();
    assert_eq!(ahead[0], AHEAD_BYTES);
    assert!(ahead.iter().all(|bytes| *bytes <= MAX_AHEAD_BYTES), "{ahead:?}");
    assert!(ahead[8..].iter().all(|bytes| *bytes >= MAX_AHEAD_BYTES / 2), "{ahead:?}");
    // Another place is a new reader, and the first one goes on where it was.
    assert_eq!(read(3000 * CHUNK), AHEAD_BYTES);
}

#[test]
fn with_many_reads_under_way_nothing_is_read_ahead() {
    let fetches = fetches();
    let differences = ByteRanges::union(vec![(0, 4096 * CHUNK)]);
    let disk = FetchedDisk { size_bytes: 4096 * CHUNK, end_bytes: 0, differences };
    fetches.begin(7, CHUNK, vec![disk]);
    std::thread::scope(|scope| {
        let first = |number: u64| number * 200 * CHUNK;
        let readers: Vec<_> = (0..FEW_READS as u64)
            .map(|number| {
                let fetches = Arc::clone(&fetches);
                scope.spawn(move || fetches.fetch(7, 0, first(number), CHUNK))
            })
            .collect();
        let known = |offset: u64| {
            let state = fetches.state.lock();
            state.point.as_ref().is_some_and(|point| point.pieces.contains_key(&(0, offset)))
        };
        // Reads ahead count too: as many reads as that may be under way before each reader began.
        while !(0..FEW_READS as u64).all(|number| known(first(number))) {
            std::thread::yield_now();
        }
        let last = scope.spawn(|| fetches.fetch(7, 0, 4000 * CHUNK, CHUNK));
        let ask = asked(&fetches, 4000 * CHUNK);
        fetches.take(&content(ask, 1)).unwrap();
        let read = last.join().unwrap();
        let found = (known(4000 * CHUNK), known(4001 * CHUNK));
        // Before the comparison: a reader without an answer would outlive a failure.
        fetches.end();
        assert!(read.is_ok());
        assert_eq!(found, (true, false));
        readers.into_iter().for_each(|reader| drop(reader.join().unwrap()));
    });
}

#[test]
fn reads_that_failed_at_the_source_are_requested_again() {
    let fetches = fetches();
    for (status, kind) in [(READ_DAMAGED, ErrorKind::Corrupt), (READ_GONE, ErrorKind::Io)] {
        let refuse = |fetches: &Fetches| {
            let ask = asked(fetches, 0);
            fetches.take(&data(ask.id, status, b"why")).unwrap();
        };
        assert_eq!(with_source(0, CHUNK, refuse, &fetches).unwrap_err().kind(), kind);
    }
    let answer = |fetches: &Fetches| {
        let ask = asked(fetches, 0);
        fetches.take(&content(ask, 1)).unwrap();
    };
    assert!(with_source(0, CHUNK, answer, &fetches).is_ok());
}

#[test]
fn content_that_does_not_fit_is_refused() {
    let fetches = fetches();
    assert!(fetches.take(&data(99, READ_GONE, b"")).is_err(), "it was not asked for");
    let hostile = |fetches: &Fetches| {
        let ask = fetches.next_read().unwrap();
        let longer = ReadAsk { length_bytes: 2 * 4096, ..ask };
        assert!(fetches.take(&content(longer, 1)).is_err());
        fetches.end();
    };
    assert_eq!(with_source(0, CHUNK, hostile, &fetches).unwrap_err().kind(), ErrorKind::Io);
}

#[test]
fn only_whole_pieces_of_the_announced_point_are_fetched() {
    let fetches = fetches();
    for (offset, length) in [(1, CHUNK), (0, 100), (0, 0), (100 * CHUNK, CHUNK), (0, 1 << 20)] {
        let error = fetches.fetch(7, 0, offset, length).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{offset} {length}");
    }
    assert_eq!(fetches.fetch(8, 0, 0, CHUNK).unwrap_err().kind(), ErrorKind::Io);
    let last = |fetches: &Fetches| {
        let ask = fetches.next_read().unwrap();
        fetches.take(&content(ask, 3)).unwrap();
    };
    let read = with_source(99 * CHUNK, CHUNK - 96, last, &fetches).unwrap();
    assert_eq!(read.len() as u64, CHUNK - 96);
    fetches.forget();
    assert_eq!(fetches.fetch(7, 0, 0, CHUNK).unwrap_err().kind(), ErrorKind::Io);
}
