//! Measures the index of 1,000 machines with 100 points each. The test with these numbers is run by
//! hand: `COLDRISE_MACHINES=1000 cargo test --release -p coldrise-inventory --test inventory --
//! --nocapture many`. By default there are few machines, and only the form is checked.

use std::time::Instant;

use coldrise_inventory::Inventory;
use coldrise_store::PassphraseSource;

use crate::common::{document, init, machine, writer};

const POINTS: i64 = 100;

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// The time that this thread has run, without waiting for a busy machine.
fn processor_ms() -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    stat.split_whitespace().next().unwrap().parse::<f64>().unwrap() / 1e6
}

#[test]
fn many_machines_are_listed_from_the_index() {
    let machines = std::env::var("COLDRISE_MACHINES").map_or(10, |text| text.parse().unwrap());
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = init(folder.path());
    let filling = writer(&path);
    for number in 0..machines {
        let machine = machine(&format!("machine{number:04}"));
        (0..POINTS).for_each(|at| filling.put_point(&document(&machine, at * 3600)).unwrap());
    }
    drop(filling);
    let timed = |what: &str, work: &mut dyn FnMut() -> u64| {
        let (started, processor, before) = (Instant::now(), processor_ms(), resident_kib());
        let count = work();
        let ms = started.elapsed().as_secs_f64() * 1e3;
        let (processor, more) = (processor_ms() - processor, resident_kib().saturating_sub(before));
        println!("{what}: {ms:.2} ms, {processor:.2} ms of processor, {count}, {more} KiB more");
    };
    let inventory = Inventory::new(&path, &PassphraseSource::None, 0);
    timed("first load", &mut || inventory.refresh().unwrap().machines.len() as u64);
    println!("resident: {} KiB", resident_kib());
    timed("refresh without a change", &mut || u64::from(inventory.refresh().unwrap().is_empty()));
    timed("again", &mut || u64::from(inventory.refresh().unwrap().is_empty()));
    let adding = writer(&path);
    let changed = machine("machine0005");
    adding.put_point(&document(&changed, 10_000_000)).unwrap();
    let mut changes = Vec::new();
    timed("refresh after a backup", &mut || {
        changes = inventory.refresh().unwrap().machines;
        changes.len() as u64
    });
    assert_eq!(changes, [changed]);
    timed("summaries as JSON", &mut || {
        serde_json::to_vec(&inventory.machines().unwrap()).unwrap().len() as u64
    });
    timed("all points as JSON", &mut || {
        serde_json::to_vec(&inventory.listing(None).unwrap()).unwrap().len() as u64
    });
    let total: u64 = inventory.machines().unwrap().iter().map(|machine| machine.points).sum();
    assert_eq!(total, (machines * POINTS + 1) as u64);
}
