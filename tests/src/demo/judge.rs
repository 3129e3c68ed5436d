//! What the acts claim, judged from what the API and the HPA said.
//!
//! Invariants: pure; nothing here knows the simulation. An act counts as shown only by evidence for it,
//! never for want of evidence against it.

use serde::Serialize;

/// The answer to a question for one pod's value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// HTTP status code.
    pub code: u16,
    /// `message` of the Status body.
    pub message: String,
}

/// The age in seconds that a message names, such as `… is 12.3 s old`.
#[must_use]
pub fn named_age(message: &str) -> Option<f64> {
    let lower = message.to_lowercase();
    let speaks_of_age = lower
        .split(|letter: char| !letter.is_alphabetic())
        .any(|word| ["age", "old", "ago", "aged"].contains(&word));
    if !speaks_of_age {
        return None;
    }
    let mut ages = Vec::new();
    let bytes = lower.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        let starts = bytes[at].is_ascii_digit()
            && (at == 0 || !(bytes[at - 1].is_ascii_alphanumeric() || b"-_.".contains(&bytes[at - 1])));
        if !starts {
            at += 1;
            continue;
        }
        let end = bytes[at..]
            .iter()
            .position(|byte| !(byte.is_ascii_digit() || *byte == b'.'))
            .map_or(bytes.len(), |length| at + length);
        let rest = lower[end..].trim_start();
        let unit: String = rest.chars().take_while(|letter| letter.is_alphabetic()).collect();
        if ["s", "sec", "second", "seconds"].contains(&unit.as_str())
            && let Ok(age) = lower[at..end].trim_end_matches('.').parse::<f64>()
        {
            ages.push(age);
        }
        at = end.max(at + 1);
    }
    // A message may also name the limit, which the age exceeds.
    ages.into_iter().reduce(f64::max)
}

/// Verdict on the stopped exporter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum StoppedExporter {
    /// Values vanished, the age was named, the HPA wanted what it had wanted.
    #[serde(rename = "held")]
    Held,
    /// The HPA wanted something else.
    #[serde(rename = "moved")]
    Moved,
    /// The API went on serving.
    #[serde(rename = "still served")]
    StillServed,
    /// The refusal does not say how old the last value is.
    #[serde(rename = "age not named")]
    AgeNotNamed,
    /// The act did not come about.
    #[serde(rename = "not shown")]
    NotShown,
}

/// Judges the stopped exporter: how the API refused a pod of that node (`None` while it served), and
/// what the HPA wanted before and during.
#[must_use]
pub fn stopped_exporter(refused: Option<&Refused>, before: i32, during: &[i32]) -> StoppedExporter {
    match refused {
        None => StoppedExporter::StillServed,
        Some(refused) if refused.code != 404 || named_age(&refused.message).is_none() => {
            StoppedExporter::AgeNotNamed
        }
        Some(_) if during.is_empty() => StoppedExporter::NotShown,
        Some(_) if during.iter().any(|desired| *desired != before) => StoppedExporter::Moved,
        Some(_) => StoppedExporter::Held,
    }
}

/// Verdict on the loading replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum LoadingReplica {
    /// The API left it out, and the HPA averaged over the others and did not shrink.
    #[serde(rename = "withheld")]
    Withheld,
    /// The API had a value for it.
    #[serde(rename = "counted")]
    Counted,
    /// The HPA's average was pulled down.
    #[serde(rename = "diluted")]
    Diluted,
    /// The HPA wanted fewer replicas.
    #[serde(rename = "shrunk")]
    Shrunk,
    /// The act did not come about.
    #[serde(rename = "not shown")]
    NotShown,
}

/// What was seen while a replica loaded.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Loading {
    /// How the API refused it by name; `None` when it served a value.
    pub refused: Option<Refused>,
    /// Answers for all pods that held it, and that left it out but held others.
    pub listed: u32,
    /// See `listed`.
    pub left_out: u32,
    /// What the exporter read for it meanwhile, percent.
    pub exporter_read: Option<f64>,
    /// Mean of the values the API answered for the ready ones, and the HPA's own average, at the look where
    /// the latter was the largest share of the former: an average that is pulled down is so at every look.
    pub averages: Option<(f64, f64)>,
    /// What the HPA wanted at the start and lowest.
    pub desired_before: i32,
    /// See `desired_before`.
    pub desired_lowest: i32,
}

/// Judges the loading replica.
#[must_use]
pub fn loading_replica(seen: &Loading) -> LoadingReplica {
    if seen.refused.is_none() || seen.listed > 0 {
        return LoadingReplica::Counted;
    }
    if seen.refused.as_ref().is_some_and(|refused| refused.code != 404) || seen.left_out == 0 {
        return LoadingReplica::NotShown;
    }
    // Where there is no reading, nothing was withheld.
    if seen.exporter_read.is_none() {
        return LoadingReplica::NotShown;
    }
    if seen.desired_lowest < seen.desired_before {
        return LoadingReplica::Shrunk;
    }
    match seen.averages {
        None => LoadingReplica::NotShown,
        Some((mean, average)) if average < mean * UNDILUTED => LoadingReplica::Diluted,
        Some(_) => LoadingReplica::Withheld,
    }
}

/// One loading replica beside one that is ready would halve the average; the rest is for the time that passes
/// between an answer of the API and the HPA's last look.
const UNDILUTED: f64 = 0.8;

impl Loading {
    /// Takes one look's mean and average.
    pub fn compare(&mut self, mean: f64, average: f64) {
        let share = |(mean, average): (f64, f64)| if mean > 0.0 { average / mean } else { 0.0 };
        if self
            .averages
            .is_none_or(|best| share((mean, average)) > share(best))
        {
            self.averages = Some((mean, average));
        }
    }
}

/// The demo's last line.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// Most replicas the HPA wanted.
    pub hpa_max: i32,
    /// Replicas it wanted at the end.
    pub hpa_end: i32,
    /// Seconds from the load's step to the HPA's first wish for more.
    pub reaction_s: Option<f64>,
    /// See [`StoppedExporter`].
    pub stopped_exporter: StoppedExporter,
    /// See [`LoadingReplica`].
    pub loading_replica: LoadingReplica,
}

impl Summary {
    /// Whether everything was as claimed.
    #[must_use]
    pub fn is_good(&self) -> bool {
        self.hpa_max > 1
            && self.hpa_end == 1
            && self.reaction_s.is_some()
            && self.stopped_exporter == StoppedExporter::Held
            && self.loading_replica == LoadingReplica::Withheld
    }

    /// The line itself.
    #[must_use]
    pub fn line(&self) -> String {
        // Keeps the order of the fields, which a JSON value would not.
        format!("{{\"demo\":{}}}", serde_json::to_string(self).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(message: &str) -> Refused {
        Refused {
            code: 404,
            message: message.to_owned(),
        }
    }

    #[test]
    fn an_age_needs_a_number_of_seconds_and_a_word_for_it() {
        for (message, age) in [
            (
                "the last sample of gpu_sm_active_percent is 12.3 s old (limit 10 s)",
                Some(12.3),
            ),
            ("newest value 13s ago, max age 10s", Some(13.0)),
            (
                "no value of gpu_sm_active_percent for pod llm-7s: age 11 seconds.",
                Some(11.0),
            ),
            ("pod llm-5s-old is not ready", None),
            ("no sample", None),
            ("an old story", None),
            ("limit 10 s exceeded", None),
        ] {
            assert_eq!(named_age(message), age, "{message}");
        }
    }

    #[test]
    fn a_stopped_exporter_is_held_only_by_evidence() {
        let good = refused("last value is 11 s old");
        assert_eq!(stopped_exporter(Some(&good), 7, &[7, 7]), StoppedExporter::Held);
        assert_eq!(
            stopped_exporter(Some(&good), 7, &[7, 6, 7]),
            StoppedExporter::Moved
        );
        assert_eq!(stopped_exporter(Some(&good), 7, &[]), StoppedExporter::NotShown);
        assert_eq!(stopped_exporter(None, 7, &[7]), StoppedExporter::StillServed);
        assert_eq!(
            stopped_exporter(Some(&refused("gone")), 7, &[7]),
            StoppedExporter::AgeNotNamed
        );
        let other = Refused {
            code: 500,
            message: "last value is 11 s old".into(),
        };
        assert_eq!(
            stopped_exporter(Some(&other), 7, &[7]),
            StoppedExporter::AgeNotNamed
        );
    }

    #[test]
    fn a_loading_replica_must_be_left_out_everywhere() {
        let good = Loading {
            refused: Some(refused("not ready")),
            listed: 0,
            left_out: 5,
            exporter_read: Some(0.0),
            averages: Some((95.0, 94.0)),
            desired_before: 2,
            desired_lowest: 2,
        };
        assert_eq!(loading_replica(&good), LoadingReplica::Withheld);
        let with = |change: fn(&mut Loading)| {
            let mut seen = good.clone();
            change(&mut seen);
            loading_replica(&seen)
        };
        assert_eq!(with(|seen| seen.refused = None), LoadingReplica::Counted);
        assert_eq!(with(|seen| seen.listed = 1), LoadingReplica::Counted);
        assert_eq!(with(|seen| seen.left_out = 0), LoadingReplica::NotShown);
        assert_eq!(with(|seen| seen.exporter_read = None), LoadingReplica::NotShown);
        assert_eq!(with(|seen| seen.desired_lowest = 1), LoadingReplica::Shrunk);
        assert_eq!(
            with(|seen| seen.averages = Some((95.0, 47.0))),
            LoadingReplica::Diluted
        );
        assert_eq!(with(|seen| seen.averages = None), LoadingReplica::NotShown);
    }

    #[test]
    fn the_best_look_counts_for_the_average() {
        let mut seen = Loading::default();
        for (mean, average) in [(95.0, 26.0), (95.0, 94.0), (95.0, 70.0), (0.0, 0.0)] {
            seen.compare(mean, average);
        }
        assert_eq!(seen.averages, Some((95.0, 94.0)));
    }

    #[test]
    fn the_last_line_is_the_one_that_was_promised() {
        let summary = Summary {
            hpa_max: 8,
            hpa_end: 1,
            reaction_s: Some(3.5),
            stopped_exporter: StoppedExporter::Held,
            loading_replica: LoadingReplica::Withheld,
        };
        assert!(summary.is_good());
        assert_eq!(
            summary.line(),
            r#"{"demo":{"hpa_max":8,"hpa_end":1,"reaction_s":3.5,"stopped_exporter":"held","loading_replica":"withheld"}}"#
        );
        assert!(
            !Summary {
                hpa_end: 2,
                ..summary
            }
            .is_good()
        );
        assert!(
            !Summary {
                stopped_exporter: StoppedExporter::Moved,
                ..summary
            }
            .is_good()
        );
    }
}
