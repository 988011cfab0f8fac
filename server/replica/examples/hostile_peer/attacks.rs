//! The attacks. Each has a line of its own, and returns what the other side said last.

use coldrise_block::Result;
use coldrise_line::{Class, Line};
use serde_json::{Value, json};

use super::{CONTENT, DELTA, LONG, MESSAGE, NAMES, PART, Reply, SHORT, STREAM, Site, Talk, WHOLE};

type Attack = fn(&Site<'_>, &Talk) -> Result<String>;

/// Of 1 MiB, the longest body of a frame.
const FRAME_BYTES: usize = 1 << 20;

pub(super) const ALL: &[(&str, Attack)] = &[
    ("content of another name", content_of_another_name),
    ("content twice", content_twice),
    ("content that was not wanted", content_not_wanted),
    ("content for unknown batches", content_for_unknown_batches),
    ("content for unknown places", content_for_unknown_places),
    ("a bomb", bomb),
    ("a bomb of many places", bomb_of_many_places),
    ("content that is not packed", content_not_packed),
    ("deltas without a base", deltas_without_base),
    ("parts without the first", parts_without_the_first),
    ("a part of a stream twice", part_twice),
    ("an unknown coding", unknown_coding),
    ("batches without content", batches_without_content),
    ("more names than a batch has", more_names_than_a_batch),
    ("more runs than names", more_runs_than_names),
    ("pieces in reverse", pieces_in_reverse),
    ("batches in reverse", batches_in_reverse),
    ("a batch twice", batch_twice),
    ("pieces between pieces", pieces_between_pieces),
    ("a piece at the end of all numbers", piece_at_the_end_of_all),
    ("holes beyond the end", holes_beyond_the_end),
    ("holes without end", holes_without_end),
    ("disks of impossible sizes", disks_of_impossible_sizes),
    ("disks that are never finished", disks_never_finished),
    ("finish before content", finish_before_content),
    ("a made-up base", made_up_base),
    ("a base of another size", base_of_another_size),
    ("another disk begun beside an open one", another_disk_begun),
    ("a point whose disks were not sent", put_not_sent),
    ("a point of another machine", put_of_another_machine),
    ("points that cannot be", put_that_cannot_be),
    ("a point that is there", put_that_is_there),
    ("a message without end", message_without_end),
    ("a message of millions of parts", message_of_millions_of_parts),
    ("messages that are none", messages_that_are_none),
    ("questions without listening", questions_without_listening),
];

fn piece(site: &Site<'_>, number: u8) -> Vec<u8> {
    (0..site.chunk_bytes).map(|at| (at as u8).wrapping_mul(number) ^ (at >> 8) as u8).collect()
}

fn packed(content: &[u8]) -> Vec<u8> {
    zstd::bulk::compress(content, 1).unwrap_or_default()
}

fn content_of_another_name(site: &Site<'_>, talk: &Talk) -> Result<String> {
    site.start(talk, 4)?;
    site.offer(talk, 1, 0, &[&piece(site, 3)])?;
    Ok(talk.answered(talk.bring(1, &[0], &packed(&piece(site, 5)))))
}

fn content_twice(site: &Site<'_>, talk: &Talk) -> Result<String> {
    site.start(talk, 4)?;
    site.offer(talk, 1, 0, &[&piece(site, 7), &piece(site, 9)])?;
    talk.bring(1, &[0], &packed(&piece(site, 7)))?;
    Ok(talk.answered(talk.bring(1, &[0], &packed(&piece(site, 7)))))
}

/// The second of two equal pieces, of a batch that waits behind another one.
fn content_not_wanted(site: &Site<'_>, talk: &Talk) -> Result<String> {
    site.start(talk, 8)?;
    site.offer(talk, 1, 0, &[&piece(site, 11)])?;
    let twice = piece(site, 13);
    site.offer(talk, 2, 1, &[&twice, &twice])?;
    talk.bring(2, &[0], &packed(&twice))?;
    talk.bring(2, &[1], &packed(&twice))?;
    Ok(talk.answered(talk.bring(1, &[0], &packed(&piece(site, 11)))))
}

fn content_for_unknown_batches(site: &Site<'_>, talk: &Talk) -> Result<String> {
    site.start(talk, 4)?;
    let content = packed(&piece(site, 15));
    let filler = vec![0; 200 << 10];
    for number in 0..2000 {
        talk.bring_coded(number, &[0], DELTA, 0, &filler)?;
    }
    site.offer(talk, 5000, 0, &[&piece(site, 15)])?;
    talk.bring(5000, &[0], &content)?;
    Ok(talk.until_applied())
}

fn content_for_unknown_places(site: &Site<'_>, talk: &Talk) -> Result<String> {
    site.start(talk, 4)?;
    site.offer(talk, 1, 0, &[&piece(site, 17)])?;
    Ok(talk.answered(talk.bring(1, &[9], &packed(&piece(site, 17)))))
}

/// 4 GiB of zeroes.
fn bomb(site: &Site<'_>, talk: &Talk) -> Result<String> {
    site.start(talk, 4)?;
    site.offer(talk, 1, 0, &[&piece(site, 19)])?;
    let mut encoder = zstd::stream::Encoder::new(Vec::new(), 1).expect("an encoder");
    std::io::copy(&mut std::io::Read::take(std::io::repeat(0), 4 << 30), &mut encoder)
        .expect("memory");
    let bomb = encoder.finish().expect("memory");
    Ok(talk.answered(talk.bring(1, &[0], &bomb[..bomb.len().min(FRAME_BYTES - 64)])))
}

fn bomb_of_many_places(site: &Site<'_>, talk: &Talk) -> Result<String> {
    site.start(talk, 4)?;
    site.offer(talk, 1, 0, &[&piece(site, 21)])?;
    let places = vec![0; 60_000];
    Ok(talk.answered(talk.bring(1, &places, &packed(&vec![0; 64 << 20]))))
}

/// A delta of a disk without a base; it is asked for as a whole, and is a delta again.
fn deltas_without_base(site: &Site<'_>, talk: &Talk) -> Result<String> {
    site.start(talk, 4)?;
    site.offer(talk, 1, 0, &[&piece(site, 27)])?;
    let content = packed(&piece(site, 27));
    talk.bring_coded(1, &[0], DELTA, 0, &content)?;
    match talk.hear(LONG) {
        Reply::Frame(WHOLE) => Ok(talk.answered(talk.bring_coded(1, &[0], DELTA, 0, &content))),
        _ => Ok("it was not asked for as a whole".to_owned()),
    }
}

/// Parts of a stream whose first part never comes.
fn parts_without_the_first(site: &Site<'_>, talk: &Talk) -> Result<String> {
    site.start(talk, 4)?;
    let mut sent = Ok(());
    for sequence in 1..2000 {
        sent = talk.bring_coded(1, &[0], STREAM, sequence, &vec![1; 512 << 10]);
        if sent.is_err() {
            break;
        }
    }
    Ok(talk.answered(sent))
}

fn part_twice(site: &Site<'_>, talk: &Talk) -> Result<String> {
    site.start(talk, 4)?;
    let other = packed(&piece(site, 45));
    talk.bring_coded(9, &[0], STREAM, 0, &other)?;
    Ok(talk.answered(talk.bring_coded(9, &[0], STREAM, 0, &other)))
}

fn unknown_coding(site: &Site<'_>, talk: &Talk) -> Result<String> {
    site.start(talk, 4)?;
    Ok(talk.answered(talk.bring_coded(9, &[0], 7, 0, &packed(&piece(site, 49)))))
}

fn content_not_packed(site: &Site<'_>, talk: &Talk) -> Result<String> {
    site.start(talk, 4)?;
    site.offer(talk, 1, 0, &[&piece(site, 23)])?;
    Ok(talk.answered(talk.bring(1, &[0], &[0xff; 5000])))
}

fn batches_without_content(site: &Site<'_>, talk: &Talk) -> Result<String> {
    let most = (4 << 20) / site.chunk_bytes;
    site.start(talk, most * 10_000)?;
    let mut sent = Ok(());
    for number in 0..10_000_u32 {
        let names = (0..most).map(|at| {
            *blake3::hash(&[number as usize, at].map(usize::to_le_bytes).concat()).as_bytes()
        });
        let run = (u64::from(number) * (4 << 20), most as u32);
        sent = talk.names(number, &[run], names);
        if sent.is_err() {
            break;
        }
    }
    Ok(talk.answered(sent))
}

fn more_names_than_a_batch(site: &Site<'_>, talk: &Talk) -> Result<String> {
    site.start(talk, 1 << 20)?;
    Ok(talk.answered(talk.names(1, &[(0, 30_000)], (0..30_000).map(|_| [1; 32]))))
}

fn more_runs_than_names(site: &Site<'_>, talk: &Talk) -> Result<String> {
    site.start(talk, 1 << 20)?;
    let mut body = 1_u32.to_le_bytes().to_vec();
    body.extend([0xff; 1000]);
    Ok(talk.answered(talk.frame(Class::Control, NAMES, body)))
}

fn pieces_in_reverse(site: &Site<'_>, talk: &Talk) -> Result<String> {
    site.start(talk, 4)?;
    let (one, other) = (piece(site, 25), piece(site, 27));
    let chunk = site.chunk_bytes as u64;
    let names = [&one, &other].map(|piece| *blake3::hash(piece).as_bytes());
    talk.names(1, &[(2 * chunk, 1), (0, 1)], names.into_iter())?;
    talk.hear(LONG);
    talk.bring(1, &[0, 1], &packed(&[one, other].concat()))?;
    Ok(talk.answered(talk.tell(&json!("finish"))))
}

fn batches_in_reverse(site: &Site<'_>, talk: &Talk) -> Result<String> {
    site.start(talk, 4)?;
    let (one, other) = (piece(site, 29), piece(site, 31));
    site.offer(talk, 1, 2, &[&one])?;
    site.offer(talk, 2, 0, &[&other])?;
    talk.bring(2, &[0], &packed(&other))?;
    talk.bring(1, &[0], &packed(&one))?;
    Ok(talk.answered(talk.tell(&json!("finish"))))
}

/// What was recorded of a good copy.
fn batch_twice(site: &Site<'_>, talk: &Talk) -> Result<String> {
    site.start(talk, 4)?;
    let content = piece(site, 33);
    for _ in 0..2 {
        site.offer(talk, 1, 0, &[&content])?;
        talk.bring(1, &[0], &packed(&content))?;
    }
    Ok(talk.answered(talk.tell(&json!("finish"))))
}

fn pieces_between_pieces(site: &Site<'_>, talk: &Talk) -> Result<String> {
    site.start(talk, 4)?;
    let content = piece(site, 35);
    talk.names(1, &[(100, 1)], std::iter::once(*blake3::hash(&content).as_bytes()))?;
    talk.hear(LONG);
    talk.bring(1, &[0], &packed(&content))?;
    Ok(talk.answered(talk.tell(&json!("finish"))))
}

fn piece_at_the_end_of_all(site: &Site<'_>, talk: &Talk) -> Result<String> {
    site.start(talk, 4)?;
    let run = (u64::MAX - 100, 2);
    Ok(talk.answered(talk.names(1, &[run], [[1; 32], [2; 32]].into_iter())))
}

fn hole(offset: u64, length: u64) -> Value {
    json!({ "hole": { "offset_bytes": offset, "length_bytes": length } })
}

fn holes_beyond_the_end(site: &Site<'_>, talk: &Talk) -> Result<String> {
    site.start(talk, 4)?;
    talk.tell(&hole(3 * site.chunk_bytes as u64, 1 << 40))?;
    Ok(talk.answered(talk.tell(&json!("finish"))))
}

fn holes_without_end(site: &Site<'_>, talk: &Talk) -> Result<String> {
    site.start(talk, 4)?;
    talk.tell(&hole(u64::MAX - 4096, u64::MAX - 4096))?;
    Ok(talk.answered(talk.tell(&json!("finish"))))
}

/// Each size, and what was said.
fn disks_of_impossible_sizes(site: &Site<'_>, talk: &Talk) -> Result<String> {
    let mut all = Vec::new();
    for size in [0, 1, 513, 1 << 60, u64::MAX] {
        let line = site.line()?;
        let sent = line.tell(&json!({ "start": { "base": null, "size_bytes": size } }));
        let mut said = line.answered(sent);
        if said.contains("started") {
            line.tell(&hole(0, size))?;
            said = line.answered(line.tell(&json!("finish")));
        }
        all.push(format!("{size}: {}", said.split('"').nth(1).unwrap_or(&said)));
        line.0.close();
    }
    talk.0.close();
    Ok(all.join("; "))
}

fn disks_never_finished(site: &Site<'_>, talk: &Talk) -> Result<String> {
    for number in 0..2000 {
        site.start(talk, 4096)?;
        site.offer(talk, number, 0, &[&piece(site, 37)])?;
    }
    // The answer to this question comes after any other.
    let answer = talk.ask(&json!({ "points": { "machine": site.machine } }))?;
    Ok(if answer["points"].is_null() { answer.to_string() } else { "nothing".to_owned() })
}

fn finish_before_content(site: &Site<'_>, talk: &Talk) -> Result<String> {
    let (point, content) = (site.point(talk)?, piece(site, 39));
    site.claim(talk)?;
    site.start(talk, 1)?;
    site.offer(talk, 1, 0, &[&content])?;
    talk.tell(&json!("finish"))?;
    let document = with(&point, "20300101T000000Z", point["disks"].clone());
    Ok(talk.answered(talk.tell(&json!({ "put": { "document": document } }))))
}

/// Pages are numbered: a map of another client is easy to guess.
fn made_up_base(_site: &Site<'_>, talk: &Talk) -> Result<String> {
    let base = json!({ "page": 1, "levels": 1 });
    Ok(talk.answered(talk.tell(&json!({ "start": { "base": base, "size_bytes": 1 << 20 } }))))
}

/// A root as they are, of an empty disk.
fn example_root(talk: &Talk) -> Option<Value> {
    talk.ask(&json!({ "start": { "base": null, "size_bytes": 1 << 20 } })).ok()?;
    talk.tell(&hole(0, 1 << 20)).ok()?;
    let finished = talk.ask(&json!("finish")).ok()?;
    finished["finished"].get("root").cloned()
}

/// A disk of the point there, as the base of one that is larger, and of one that is smaller.
fn base_of_another_size(site: &Site<'_>, talk: &Talk) -> Result<String> {
    let point = site.point(talk)?;
    let mut all = Vec::new();
    for (number, factor) in [(1, 2.0), (2, 0.5)] {
        let line = site.line()?;
        site.claim(&line)?;
        line.ask(&json!({ "keep": { "machine": site.machine, "point": point["point"] } }))?;
        let disk = &point["disks"][0];
        let size = (disk["size_bytes"].as_u64().unwrap_or_default() as f64 * factor) as u64;
        let mut said = line
            .answered(line.tell(&json!({ "start": { "base": disk["root"], "size_bytes": size } })));
        if said.contains("started") {
            let finished = line.ask(&json!("finish"))?;
            let disks = json!([{ "name": disk["name"], "size_bytes": size, "root": finished["finished"]["root"] }]);
            let document = with(&point, &format!("2031010{number}T000000Z"), disks);
            said = line.answered(line.tell(&json!({ "put": { "document": document } })));
        }
        all.push(said);
        line.0.close();
    }
    Ok(all.join("; "))
}

/// The parts of one disk must not count as those of another.
fn another_disk_begun(site: &Site<'_>, talk: &Talk) -> Result<String> {
    let (point, content) = (site.point(talk)?, piece(site, 41));
    site.claim(talk)?;
    let announce = |disk: &str, size: usize| {
        let made_in = json!({ "repository": "07".repeat(16), "machine": site.machine });
        let disks =
            json!([{ "name": disk, "size_bytes": size, "root": point["disks"][0]["root"] }]);
        let mut document = with(&point, "20320101T000000Z", disks);
        document["machine"] = json!(site.machine);
        document["created_at_ms"] = json!(1);
        document["made_in"] = made_in;
        let details = json!([[[[0, size]]], ""]).to_string().into_bytes();
        let mut attachment = (details.len() as u32).to_le_bytes().to_vec();
        attachment.extend(details);
        let attachment = zstd::bulk::compress(&attachment, 1).unwrap_or_default();
        talk.ask_with(
            &json!({ "announce": { "number": 1, "document": document, "bases": [null] } }),
            &attachment,
        )
    };
    announce("vda", 4 * site.chunk_bytes)?;
    site.start(talk, 4)?;
    site.offer(talk, 1, 0, &[&content])?;
    talk.bring(1, &[0], &packed(&content))?;
    talk.until_applied();
    // Now the larger one is the incoming point.
    announce("vdb", 400 * site.chunk_bytes)?;
    talk.tell(&json!("abandon"))?;
    let begun = announce("vdb", 400 * site.chunk_bytes)?;
    let begun = &begun["announced"]["begun"][0];
    if begun.is_null() {
        return Ok("nothing has begun".to_owned());
    }
    let root = &begun["root"];
    let started = talk.answered(
        talk.tell(&json!({ "start": { "base": root, "size_bytes": 400 * site.chunk_bytes } })),
    );
    if !started.contains("started") {
        return Ok(started);
    }
    let finished = talk.ask(&json!("finish"))?;
    let disks = json!([{ "name": "vdb", "size_bytes": 400 * site.chunk_bytes, "root": finished["finished"]["root"] }]);
    let document = with(&point, "20320101T000000Z", disks);
    Ok(talk.answered(talk.tell(&json!({ "put": { "document": document } }))))
}

/// The point under another name, with other disks.
fn with(point: &Value, name: &str, disks: Value) -> Value {
    let mut document = point.clone();
    document["point"] = json!(name);
    document["disks"] = disks;
    document
}

fn put_not_sent(site: &Site<'_>, talk: &Talk) -> Result<String> {
    let point = site.point(talk)?;
    site.claim(talk)?;
    let document = with(&point, "20330101T000000Z", point["disks"].clone());
    Ok(talk.answered(talk.tell(&json!({ "put": { "document": document } }))))
}

/// An empty disk of 1 MiB that was sent.
fn sent_disk(talk: &Talk) -> Value {
    json!({ "name": "vda", "size_bytes": 1 << 20, "root": example_root(talk) })
}

fn put_of_another_machine(site: &Site<'_>, talk: &Talk) -> Result<String> {
    let point = site.point(talk)?;
    talk.ask(&json!({ "claim": { "machine": "of-the-hostile" } }))?;
    let document = with(&point, "20340101T000000Z", json!([sent_disk(talk)]));
    Ok(talk.answered(talk.tell(&json!({ "put": { "document": document } }))))
}

/// No disks; one disk twice; names that are paths.
fn put_that_cannot_be(site: &Site<'_>, talk: &Talk) -> Result<String> {
    let point = site.point(talk)?;
    let mut all = Vec::new();
    for number in 0..5 {
        let line = site.line()?;
        site.claim(&line)?;
        let disk = sent_disk(&line);
        let mut document = with(&point, "20350101T000000Z", json!([disk]));
        match number {
            0 => document["disks"] = json!([]),
            1 => document["disks"] = json!([disk, disk]),
            2 => document["machine"] = json!("../../outside"),
            3 => document["point"] = json!("../outside"),
            _ => document["disks"][0]["name"] = json!("../vda"),
        }
        all.push(line.answered(line.tell(&json!({ "put": { "document": document } }))));
        line.0.close();
    }
    Ok(all.join("; "))
}

fn put_that_is_there(site: &Site<'_>, talk: &Talk) -> Result<String> {
    let point = site.point(talk)?;
    site.claim(talk)?;
    let document =
        with(&point, point["point"].as_str().unwrap_or_default(), json!([sent_disk(talk)]));
    Ok(talk.answered(talk.tell(&json!({ "put": { "document": document } }))))
}

fn message_without_end(_site: &Site<'_>, talk: &Talk) -> Result<String> {
    let mut sent = Ok(());
    for _ in 0..300 {
        sent = talk.frame(Class::Control, PART, vec![b'['; FRAME_BYTES]);
        if sent.is_err() {
            break;
        }
    }
    Ok(talk.answered(sent))
}

/// As long as a message may be, and as much memory as its parts can take.
fn message_of_millions_of_parts(site: &Site<'_>, talk: &Talk) -> Result<String> {
    let point = site.point(talk)?;
    site.claim(talk)?;
    let mut document = with(&point, "20360101T000000Z", json!([sent_disk(talk)]));
    let sources: Vec<String> = vec![String::new(); 40_000_000];
    document["origin"] = json!({ "backup": { "sources": [] } });
    let text = json!({ "put": { "document": document } }).to_string();
    let text = text.replace(
        "\"sources\":[]",
        &format!("\"sources\":[{}]", vec!["\"\""; sources.len()].join(",")),
    );
    let mut body = (text.len() as u32).to_le_bytes().to_vec();
    body.extend(text.into_bytes());
    let mut sent = Ok(());
    let parts = body.chunks(FRAME_BYTES).count();
    for (number, part) in body.chunks(FRAME_BYTES).enumerate() {
        let kind = if number + 1 == parts { MESSAGE } else { PART };
        sent = talk.frame(Class::Control, kind, part.to_vec());
        if sent.is_err() {
            break;
        }
    }
    match talk.hear(LONG * 2) {
        Reply::Message(answer) => Ok(match answer["failed"]["message"].as_str() {
            Some(refusal) => format!("refused: {refusal}"),
            None => answer.to_string(),
        }),
        _ => Ok(talk.answered(sent)),
    }
}

fn messages_that_are_none(site: &Site<'_>, _talk: &Talk) -> Result<String> {
    let mut all = Vec::new();
    let bodies: [(u8, Vec<u8>); 6] = [
        (MESSAGE, Vec::new()),
        (MESSAGE, vec![0xff; 4]),
        (MESSAGE, [&20_u32.to_le_bytes()[..], b"{\"hello\":{\"version\":"].concat()),
        (MESSAGE, [&8_u32.to_le_bytes()[..], b"\"delete\""].concat()),
        (CONTENT, vec![1; 7]),
        (99, vec![1; 7]),
    ];
    for (kind, body) in bodies {
        let line = site.line()?;
        all.push(line.answered(line.frame(Class::Control, kind, body)));
        line.0.close();
    }
    Ok(all.join("; "))
}

/// Requests answers and never reads them.
fn questions_without_listening(site: &Site<'_>, talk: &Talk) -> Result<String> {
    let question = json!({ "points": { "machine": site.machine } });
    std::thread::scope(|scope| {
        // The other side stops reading when it cannot write: this one waits then, until the line is closed.
        let asking =
            scope.spawn(|| (0..200_000).take_while(|_| talk.tell(&question).is_ok()).count());
        std::thread::sleep(SHORT);
        talk.0.close();
        let asked = asking.join().unwrap_or_default();
        Ok(format!("took {}", if asked < 200_000 { "some" } else { "all" }))
    })
}
