//! One batched question for many fields, asking only what the device offers.
//!
//! Invariants: one NVML call per [`Batch::ask`], none where nothing is worth asking; buffers are reused; an answer
//! belongs to the latest ask or is a gap.

use std::time::Instant;

use forewarm_nvml::{Device, Field, FieldQuery, Gap, Number, Reading, Scope};

use super::capability::Capability;
use super::tally::Tally;

/// Fields that are read together.
#[derive(Debug)]
pub(super) struct Batch {
    entries: Vec<Entry>,
    asked: Vec<FieldQuery>,
}

#[derive(Debug)]
struct Entry {
    query: FieldQuery,
    capability: Capability,
    is_wanted: bool,
}

impl Batch {
    /// A batch of these fields of the whole GPU.
    #[must_use]
    pub(super) fn of_gpu(fields: &[Field]) -> Self {
        Self::new(fields.iter().map(|field| FieldQuery::new(*field, Scope::Gpu)))
    }

    /// A batch of these queries.
    #[must_use]
    pub(super) fn new(queries: impl IntoIterator<Item = FieldQuery>) -> Self {
        Self {
            entries: queries
                .into_iter()
                .map(|query| Entry {
                    query,
                    capability: Capability::Unknown,
                    is_wanted: true,
                })
                .collect(),
            asked: Vec::new(),
        }
    }

    /// Leaves a field out of the next asks, or takes it in again.
    pub(super) fn want(&mut self, field: Field, is_wanted: bool) {
        for entry in self.entries.iter_mut().filter(|entry| entry.query.field == field) {
            entry.is_wanted = is_wanted;
        }
    }

    /// Asks everything that is worth asking, with one call.
    pub(super) fn ask(&mut self, device: &mut dyn Device, now: Instant, tally: &mut Tally<'_>) {
        self.asked.clear();
        for entry in &mut self.entries {
            entry.query.answer = Err(Gap::NotYet);
            if entry.is_wanted && entry.capability.is_worth_asking(now) {
                self.asked.push(entry.query);
            }
        }
        if self.asked.is_empty() {
            return;
        }
        let outcome = device.fields(&mut self.asked);
        tally.note(&outcome);
        let mut answers = self.asked.iter();
        for entry in &mut self.entries {
            if !(entry.is_wanted && entry.capability.is_worth_asking(now)) {
                continue;
            }
            let Some(asked) = answers.next() else { break };
            entry.query.answer = match outcome {
                Ok(()) => asked.answer,
                Err(gap) => Err(gap),
            };
            entry.capability = entry.capability.after(&entry.query.answer, now);
            if outcome.is_ok() && entry.query.answer != Err(Gap::Unsupported) {
                tally.note_entry(&entry.query.answer);
            }
        }
    }

    /// The answer of the latest ask.
    pub(super) fn answer(&self, field: Field, scope: Scope) -> Reading<Number> {
        self.entries
            .iter()
            .find(|entry| entry.query.field == field && entry.query.scope == scope)
            .map_or(Err(Gap::Unsupported), |entry| entry.query.answer)
    }

    /// Whether the device offers a field, in any scope.
    #[must_use]
    pub(super) fn is_supported(&self, field: Field) -> Option<bool> {
        self.entries
            .iter()
            .filter(|entry| entry.query.field == field)
            .filter_map(|entry| entry.capability.is_supported())
            .reduce(|any, this| any || this)
    }

    /// What is known of each field, once per field.
    pub(super) fn support(&self) -> impl Iterator<Item = (&'static str, bool)> + '_ {
        let mut seen = Vec::new();
        self.entries.iter().filter_map(move |entry| {
            let field = entry.query.field;
            if seen.contains(&field) {
                return None;
            }
            seen.push(field);
            self.is_supported(field)
                .map(|is_supported| (field.name(), is_supported))
        })
    }
}
