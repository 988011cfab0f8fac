//! The forms of stored types in the API's description.
//!
//! These types exist only for the OpenAPI document: the store's own types are serialized. A test
//! compares both.

use utoipa::ToSchema;

/// Why a restore point is in quarantine.
#[derive(ToSchema)]
#[schema(as = Quarantine, rename_all = "snake_case")]
pub enum QuarantineSchema {
    /// A repair found a part of it damaged.
    Damaged,
    /// A person put it there.
    Chosen,
}

/// Whether a point boots.
#[derive(ToSchema)]
#[schema(as = BootVerdict, rename_all = "snake_case")]
pub enum BootVerdictSchema {
    /// It reached the wanted stage.
    Ok,
    /// It provably failed.
    Failed,
    /// No proof of either within the time limit.
    NotProven,
}

/// The evidence of a boot check.
#[derive(ToSchema)]
#[schema(as = BootCheck)]
pub struct BootCheckSchema {
    /// The end of the check, in milliseconds since 1970-01-01T00:00:00Z.
    pub checked_at_ms: u64,
    /// The result.
    pub verdict: BootVerdictSchema,
    /// The stage that was to be reached.
    pub until: String,
    /// The reached stages, from the lowest on.
    #[schema(rename = "rungs")]
    pub stages: Vec<ReachedStageSchema>,
    /// The proof of the failure.
    #[schema(required)]
    pub failure: Option<String>,
    /// Why a check of the user proved nothing.
    #[schema(required)]
    pub note: Option<String>,
    /// Nothing was proven, and the machine came less far than in its last good checks.
    pub is_worse: bool,
    /// The highest stage of those checks. Set only if nothing was proven.
    #[schema(required, rename = "usual_rung")]
    pub usual_stage: Option<String>,
    /// The text of the screen, if it had any.
    #[schema(required)]
    pub screen_text: Option<String>,
    /// The last lines of the serial port.
    pub serial_tail: Vec<String>,
}

/// How far a boot came, and the proof of it.
#[derive(ToSchema)]
#[schema(as = BootRung)]
pub struct ReachedStageSchema {
    /// Such as `login`.
    #[schema(rename = "rung")]
    pub stage: String,
    /// Since the start of the machine, in milliseconds.
    pub after_ms: u64,
    /// In words.
    pub evidence: String,
}

/// The configuration of a machine, byte for byte as it was given.
#[derive(ToSchema)]
#[schema(as = Configuration)]
pub struct ConfigurationSchema {
    /// The format, for example `libvirt-xml`.
    pub format: String,
    /// The text.
    pub text: String,
}

/// A damaged document.
#[derive(ToSchema)]
#[schema(as = DamagedDocument)]
pub struct DamageSchema {
    /// Its name, as far as it is known.
    pub what: String,
    /// The kind of damage, in words.
    pub reason: String,
}

/// Memory for the indexes of a repository, in bytes.
#[derive(ToSchema)]
#[schema(as = IndexMemory)]
pub struct IndexMemorySchema {
    /// In every reading process.
    pub reader_bytes: u64,
    /// Maximum of the caches in every reading process.
    pub reader_cache_bytes: u64,
    /// In a writer, in addition to the reader's.
    pub writer_bytes: u64,
    /// Maximum of the caches in a writer, instead of the reader's.
    pub writer_cache_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use coldrise_store::{
        BootCheckDocument, BootVerdict, CatalogDamage, Configuration, IndexMemory, Quarantine,
        ReachedStage,
    };
    use serde_json::{Value, json};
    use utoipa::PartialSchema;

    fn described<T: PartialSchema>() -> Value {
        serde_json::to_value(T::schema()).unwrap()
    }

    #[track_caller]
    fn assert_same_fields<T: PartialSchema>(stored: &impl serde::Serialize) {
        let names = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        let stored = serde_json::to_value(stored).unwrap();
        assert_eq!(names(&described::<T>()["properties"]), names(&stored));
    }

    #[test]
    fn described_forms_are_the_serialized_ones() {
        let stage = ReachedStage { stage: String::new(), after_ms: 0, evidence: String::new() };
        assert_same_fields::<ReachedStageSchema>(&stage);
        assert_same_fields::<BootCheckSchema>(&BootCheckDocument {
            checked_at_ms: 0,
            verdict: BootVerdict::Ok,
            until: String::new(),
            stages: vec![stage],
            note: None,
            is_worse: false,
            usual_stage: None,
            failure: None,
            screen_text: None,
            serial_tail: Vec::new(),
        });
        let configuration = Configuration { format: String::new(), text: String::new() };
        assert_same_fields::<ConfigurationSchema>(&configuration);
        assert_same_fields::<DamageSchema>(&CatalogDamage::new(String::new(), String::new()));
        assert_same_fields::<IndexMemorySchema>(&IndexMemory::default());
        let verdicts = [BootVerdict::Ok, BootVerdict::Failed, BootVerdict::NotProven];
        assert_eq!(described::<BootVerdictSchema>()["enum"], json!(verdicts));
        let quarantines = [Quarantine::Damaged, Quarantine::Chosen];
        assert_eq!(described::<QuarantineSchema>()["enum"], json!(quarantines));
    }
}
