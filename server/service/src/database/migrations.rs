//! The tables, as one step per version. A step that was released never changes.

use rusqlite::Connection;

use super::SqlResult;

/// The statements that lead from version N to N + 1.
const STEPS: [&str; 7] = [
    include_str!("schema_1.sql"),
    include_str!("schema_2.sql"),
    include_str!("schema_3.sql"),
    include_str!("schema_4.sql"),
    include_str!("schema_5.sql"),
    include_str!("schema_6.sql"),
    include_str!("schema_7.sql"),
];

/// Brings the tables to the newest version, each step in a transaction. Returns the version that
/// is found if it is newer than what this program knows.
pub(super) fn apply(connection: &mut Connection) -> SqlResult<Option<usize>> {
    let found: usize = connection.pragma_query_value(None, "user_version", |row| row.get(0))?;
    if found > STEPS.len() {
        return Ok(Some(found));
    }
    for (version, step) in STEPS.iter().enumerate().skip(found) {
        let transaction = connection.transaction()?;
        transaction.execute_batch(step)?;
        transaction.pragma_update(None, "user_version", version + 1)?;
        transaction.commit()?;
    }
    Ok(None)
}
