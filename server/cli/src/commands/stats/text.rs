//! Formats the numbers for people.

use coldrise_inventory::{MachineStats, Stats, Unique};
use coldrise_store::CatalogDamage;

use crate::report::table;
use crate::units::{show_count, show_size};

pub(super) fn of_repository(stats: &Stats) -> String {
    let mut text = format!(
        "{}, {}, {}\n\n",
        show_count(stats.machines, "machine"),
        show_count(stats.points, "restore point"),
        show_count(stats.sessions, "session")
    );
    let line = |text: &mut String, what: &str, bytes: u64, remark: &str| {
        let size = show_size(bytes);
        text.push_str(format!("{what:<20}{size:>12}  {remark}").trim_end());
        text.push('\n');
    };
    line(&mut text, "sum of all disks", stats.virtual_bytes, "of every restore point");
    line(&mut text, "recoverable", stats.recoverable_bytes, "holes left out");
    let saved = format!("{:.1} % saved", stats.deduplication_percent);
    line(&mut text, "after deduplication", stats.unique_bytes, &saved);
    let saved = format!(
        "{:.1} % saved, {:.1} % in all",
        stats.compression_percent, stats.reduction_percent
    );
    line(&mut text, "after compression", stats.stored_bytes, &saved);
    text.push('\n');
    line(&mut text, "occupied on disk", stats.occupied_bytes, "");
    let chunks = show_count(stats.chunks, "chunk");
    line(&mut text, "  database", stats.database_bytes, &chunks);
    line(&mut text, "  captured writes", stats.captured_bytes, "");
    line(&mut text, "  the rest", stats.other_bytes, "");
    if let Some(bytes) = stats.reclaimable_bytes {
        line(&mut text, "reclaimable", bytes, "about: coldrise gc returns it");
    }
    if let Some(bytes) = stats.kept_unreferenced_bytes {
        let remark = "about: unused, in files that are mostly in use; see gc --max-unused";
        line(&mut text, "kept unreferenced", bytes, remark);
    }
    let memory = &stats.index_memory;
    let caches = format!("and up to {} of caches", show_size(memory.reader_cache_bytes));
    line(&mut text, "index in a reader", memory.reader_bytes, &caches);
    let caches = format!("and up to {} of caches", show_size(memory.writer_cache_bytes));
    let writer = memory.reader_bytes.saturating_add(memory.writer_bytes);
    line(&mut text, "index in a writer", writer, &caches);
    if !stats.damaged_documents.is_empty() {
        let lines: Vec<String> = stats.damaged_documents.iter().map(damage).collect();
        text.push_str(&format!("\nnot counted:\n  {}\n", lines.join("\n  ")));
    }
    if stats.by_machine.is_empty() {
        return text;
    }
    let rows: Vec<Vec<String>> = stats.by_machine.iter().map(row_of_machine).collect();
    text.push('\n');
    text.push_str(&table(
        &["MACHINE", ">POINTS", ">SUM OF DISKS", ">RECOVERABLE", ">DEDUP", ">COMPR", ">UNIQUE"],
        &rows,
    ));
    text.push_str(
        "\ndedup, compr: saved by deduplication among the machine's own points, and by compression \
         of the data that only it uses\nunique: estimate of the data that only this machine uses. After \
         all its points are forgotten, coldrise gc returns this space, except in files that are \
         mostly in use (kept unreferenced). coldrise stats MACHINE shows it for each point\n",
    );
    text
}

/// The damage and the suggested command.
pub(super) fn damage(damaged: &CatalogDamage) -> String {
    let next = match damaged.command() {
        Some(_) => "",
        None => "; coldrise verify says what it affects",
    };
    format!("{}{next}", damaged.message())
}

fn row_of_machine(machine: &MachineStats) -> Vec<String> {
    vec![
        machine.machine.clone(),
        machine.points.len().to_string(),
        show_size(machine.virtual_bytes),
        show_size(machine.recoverable_bytes),
        format!("{:.1} %", machine.deduplication_percent),
        machine.compression_percent.map_or_else(String::new, |saved| format!("{saved:.1} %")),
        show_unique(&machine.unique),
    ]
}

fn show_unique(unique: &Unique) -> String {
    show_size(unique.unique_stored_bytes)
}

pub(super) fn of_machine(stats: &MachineStats) -> String {
    let rows: Vec<Vec<String>> = stats
        .points
        .iter()
        .map(|point| {
            vec![
                point.address.clone(),
                show_size(point.virtual_bytes),
                show_size(point.recoverable_bytes),
                show_unique(&point.unique),
                if point.is_protected { "yes" } else { "" }.to_owned(),
                point.quarantine.map_or_else(String::new, |quarantine| quarantine.to_string()),
            ]
        })
        .collect();
    // The last column appears only if a row has a text in it.
    let is_any = stats.points.iter().any(|point| point.quarantine.is_some());
    let headings =
        ["ADDRESS", ">SUM OF DISKS", ">RECOVERABLE", ">UNIQUE", "PROTECTED", "QUARANTINED"];
    let mut text = table(&headings[..headings.len() - usize::from(!is_any)], &rows);
    text.push_str(&format!(
        "\nunique: estimate of the data that only this point uses. After the point is forgotten, \
         coldrise gc returns this space, except in files that are mostly in use. All points of {} \
         together: {}\n",
        stats.machine,
        show_unique(&stats.unique)
    ));
    text
}
