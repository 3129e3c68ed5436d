//! Why an object has no value, in words that a person can act on.
//!
//! Invariants: a text names the age where there is one, and how the target that should have answered fails.

use std::time::Duration;

use super::{Clock, NAMED};
use crate::index::{Entry, State, TargetId, Value};

/// Why an object has no value.
pub(super) enum Gap<'s> {
    Stale(&'s Value, Duration),
    Withheld(&'s str),
    Absent(&'s str),
    Nothing,
}

pub(super) fn usable(entry: Option<&Entry>, clock: Clock) -> Result<&Value, Gap<'_>> {
    match entry {
        None => Err(Gap::Nothing),
        Some(Entry::Withheld(text)) => Err(Gap::Withheld(text)),
        Some(Entry::Absent(text)) => Err(Gap::Absent(text)),
        Some(Entry::Value(value)) => {
            let mut value = value;
            loop {
                let age = clock.age(value.measured_at);
                if age <= value.max_age {
                    return Ok(value);
                }
                match &value.then {
                    Some(later) => value = later,
                    None => return Err(Gap::Stale(value, age)),
                }
            }
        }
    }
}

impl Gap<'_> {
    /// What follows the object's name in a refusal.
    pub(super) fn text(&self, state: &State, source: &str, node: Option<&str>, clock: Clock) -> String {
        match self {
            Self::Withheld(text) => (*text).to_owned(),
            Self::Absent(text) => format!("{text}{}", failure_on(state, source, node, clock)),
            Self::Stale(value, age) => format!(
                "has its last sample {} ago, older than maxAge {}{}",
                seconds(*age),
                seconds(value.max_age),
                failure_of(state, &value.target, clock)
            ),
            Self::Nothing => format!("was never reported{}", failure_on(state, source, node, clock)),
        }
    }
}

pub(super) fn seconds(duration: Duration) -> String {
    let seconds = duration.as_secs_f64();
    if duration.subsec_millis() == 0 || seconds >= 10.0 {
        format!("{seconds:.0} s")
    } else {
        format!("{seconds:.1} s")
    }
}

/// How a target fails, with a leading separator; empty where it answers.
pub(super) fn failure_of(state: &State, target: &TargetId, clock: Clock) -> String {
    let Some(known) = state.targets.get(target) else {
        return format!("; target {} is gone", target.name);
    };
    match &known.failure {
        Some(failure) => format!(
            "; target {} failed {} ago: {}",
            target.name,
            seconds(clock.age(failure.at)),
            failure.text
        ),
        None => String::new(),
    }
}

/// How the targets of a source on a node fail; all of the source's where the node is not known.
fn failure_on(state: &State, source: &str, node: Option<&str>, clock: Clock) -> String {
    let mut of_source = state
        .targets
        .iter()
        .filter(|(target, _)| *target.source == *source)
        .peekable();
    if of_source.peek().is_none() {
        return format!("; source {source} has no targets");
    }
    let on_node = state
        .targets
        .iter()
        .find(|(target, known)| *target.source == *source && node.is_some() && known.node.as_deref() == node);
    match (on_node, node) {
        (Some((target, _)), _) => failure_of(state, target, clock),
        (None, Some(node)) if of_source.all(|(_, known)| known.node.is_some()) => {
            format!("; source {source} has no target on node {node}")
        }
        _ => failures(state, source, clock),
    }
}

/// All failing targets of a source, at most a few.
pub(super) fn failures(state: &State, source: &str, clock: Clock) -> String {
    let mut failing: Vec<_> = state
        .targets
        .iter()
        .filter(|(target, known)| *target.source == *source && known.failure.is_some())
        .map(|(target, _)| target)
        .collect();
    failing.sort_unstable();
    failing.truncate(NAMED);
    failing
        .into_iter()
        .map(|target| failure_of(state, target, clock))
        .collect()
}
